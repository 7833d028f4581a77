// The rules on a GPU: words and classes are compiled for the device as they are for the host. tests/gpu/words_test.cu
// runs it.
#include "rules/classes.h"

namespace anyflash::rules {

/// Words of 64 keys for each query, the words of 64 queries for each key, and the class of the tile: one block of 64
/// threads.
__global__ void answer(const __grid_constant__ Program program, Box queries, Box keys, Word* words,
                       Word* words_of_queries, TileClass* tile) {
  const auto entry = static_cast<std::int32_t>(threadIdx.x);
  const auto query = queries.entry(entry), key = keys.entry(entry);
  words[entry] = inside(query, program.q_size()) ? word(program, query, keys) : 0;
  words_of_queries[entry] = inside(key, program.k_size()) ? word_of_queries(program, key, queries) : 0;
  if (entry == 0) *tile = tile_class(program, queries, keys);
}

}  // namespace anyflash::rules
