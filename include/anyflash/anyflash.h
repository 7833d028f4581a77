// anyflash: exact attention, forward and backward, with memory linear in the sequence, under any mask rule.
#pragma once

#include <anyflash/attention.h>
#include <anyflash/devices.h>
#include <anyflash/explain.h>
#include <anyflash/join.h>
#include <anyflash/names.h>
#include <anyflash/rule.h>
#include <anyflash/sharding.h>
#include <anyflash/tensor.h>
#include <anyflash/tile_machine.h>
#include <anyflash/version.h>
