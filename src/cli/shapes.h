// Sequence shapes as the command line writes them: 4096, 512x512, 16x64x64.
#pragma once

#include <anyflash/explain.h>

#include <string>

namespace anyflash::cli {

/// Throws Error naming `option`; at most INT32_MAX entries.
SequenceShape parse_shape(const std::string& option, const std::string& text);
/// The text of --keys; the queries' shape if it is empty. Throws Error if it has other dimensions.
SequenceShape parse_keys(const std::string& text, const SequenceShape& queries);
std::string text_of(const SequenceShape& shape);
std::int64_t volume(const SequenceShape& shape);

}  // namespace anyflash::cli
