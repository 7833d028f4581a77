// Test of device functions: the swizzle's address.
//
// Three properties, none of which needs a kernel: a function that is both __host__ and __device__ is tested on the host.
// Each 16 bytes have a place of their own; a row keeps to its own 128 bytes; and the eight rows of an 8 x 8 matrix lie in
// eight different groups of banks, which is the purpose.
#include "device.h"

namespace {

// Where the 16 bytes begin that hold this column of a row of 64 float16, in float16.
__host__ __device__ int place(int row, int column) { return row * 64 + (column / 8 ^ row % 8) * 8; }

}  // namespace

extern "C" const char* test() {
  bool taken[64 * 8] = {};
  for (int row = 0; row < 64; ++row)
    for (int column = 0; column < 64; column += 8) {
      const int at = place(row, column);
      if (at / 64 != row) return "place: a row leaves its 128 bytes";
      if (taken[at / 8]) return "place: two columns have one place";
      taken[at / 8] = true;
    }
  for (int row0 = 0; row0 < 64; row0 += 8)
    for (int column = 0; column < 64; column += 8) {
      unsigned groups = 0;  // of four banks, 16 bytes wide
      for (int row = row0; row < row0 + 8; ++row) groups |= 1u << place(row, column) / 8 % 8;
      if (groups != 0xff) return "place: a matrix has a bank conflict";
    }
  return nullptr;
}
