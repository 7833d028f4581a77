// The aligned coordinate of an entry, as rules use it: restarted in each document if the program says so.
#pragma once

#include "rules/program.h"

namespace anyflash::rules {

struct Coordinate {
  std::int64_t v[3];
  ANYFLASH_HD std::int64_t operator[](int i) const { return v[i]; }
};

ANYFLASH_HD Coordinate query_coordinate(const Program& program, const Int3& c) {
  if (program.restarts) {
    const auto& side = program.documents.q;
    const auto& segment = side.segments[side.segment_of[c[2]]];
    return {{0, 0, program.documents.axes[segment.document].query(segment.base + c[2] - segment.start)}};
  }
  return {{program.axis[0].query(c[0]), program.axis[1].query(c[1]), program.axis[2].query(c[2])}};
}

ANYFLASH_HD Coordinate key_coordinate(const Program& program, const Int3& c) {
  if (program.restarts) {
    const auto& side = program.documents.k;
    const auto& segment = side.segments[side.segment_of[c[2]]];
    return {{0, 0, program.documents.axes[segment.document].key(segment.base + c[2] - segment.start)}};
  }
  return {{program.axis[0].key(c[0]), program.axis[1].key(c[1]), program.axis[2].key(c[2])}};
}

}  // namespace anyflash::rules
