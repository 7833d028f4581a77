#pragma once

#define ANYFLASH_VERSION "0.1.0"
