// PTX texts and operands of a warpgroup's products: results are 16 to 128 registers, each named one by one.
#pragma once

// clang-format off
#define ANYFLASH_REGISTERS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define ANYFLASH_REGISTERS_FROM_16 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ANYFLASH_REGISTERS_FROM_32 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define ANYFLASH_REGISTERS_FROM_48 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define ANYFLASH_REGISTERS_FROM_64 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define ANYFLASH_REGISTERS_FROM_80 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define ANYFLASH_REGISTERS_FROM_96 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define ANYFLASH_REGISTERS_FROM_112 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define ANYFLASH_REGISTERS_32 ANYFLASH_REGISTERS_16 ", " ANYFLASH_REGISTERS_FROM_16
#define ANYFLASH_REGISTERS_64 ANYFLASH_REGISTERS_32 ", " ANYFLASH_REGISTERS_FROM_32 ", " ANYFLASH_REGISTERS_FROM_48
#define ANYFLASH_REGISTERS_128 \
  ANYFLASH_REGISTERS_64 ", " ANYFLASH_REGISTERS_FROM_64 ", " ANYFLASH_REGISTERS_FROM_80 ", " \
  ANYFLASH_REGISTERS_FROM_96 ", " ANYFLASH_REGISTERS_FROM_112
// clang-format on

/// operand(j), operand(j + 1), ...
#define ANYFLASH_TIMES_4(operand, j) operand(j), operand(j + 1), operand(j + 2), operand(j + 3)
#define ANYFLASH_TIMES_8(operand, j) ANYFLASH_TIMES_4(operand, j), ANYFLASH_TIMES_4(operand, j + 4)
#define ANYFLASH_TIMES_16(operand, j) ANYFLASH_TIMES_8(operand, j), ANYFLASH_TIMES_8(operand, j + 8)
#define ANYFLASH_TIMES_32(operand, j) ANYFLASH_TIMES_16(operand, j), ANYFLASH_TIMES_16(operand, j + 16)
