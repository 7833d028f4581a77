// Calls may come while a thread or the process ends, when what the library keeps for them is gone already.
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include <anyflash/anyflash.h>
#include <gtest/gtest.h>

namespace {

using anyflash::ElementType, anyflash::TensorView;

std::vector<float> computed(anyflash::Options options) {
  constexpr std::int64_t n = 300, d = 32;
  std::vector<float> x(n * d), out(n * d);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 17) - 8;
  const TensorView view(x.data(), ElementType::float32, {1, 1, n, d});
  options.threads = 1;
  anyflash::forward(view, view, view, {TensorView(out.data(), ElementType::float32, {1, 1, n, d}), {}, {}, {}},
                    options);
  return out;
}

struct Results {
  std::vector<float> of_documents, of_all;
  std::vector<std::string> instruction_sets;
  bool operator==(const Results&) const = default;
};

Results all_computed() {
  std::vector<std::int32_t> ids(300);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i / 70);
  const TensorView document(ids.data(), ElementType::int32, {300});
  anyflash::Options options;
  options.rule = anyflash::documents(document, document);
  const auto sets = anyflash::instruction_sets();
  return {computed(options), computed({}), {sets.begin(), sets.end()}};
}

constexpr int same = 3, other = 4;  // how a process ends

/// Computes when it is destroyed, which is after what came later. As a process's last act: LLVM's OpenMP does not
/// survive the end of a process that was forked.
struct AtEnd {
  Results expected, *found = nullptr;
  ~AtEnd() {
    if (found) *found = all_computed();
    else if (!expected.of_all.empty()) _exit(all_computed() == expected ? same : other);
  }
} at_end_of_process;

TEST(Calls, WhileTheProcessEnds) {
  const auto in_a_process = [] {
    at_end_of_process.expected = all_computed();
    std::exit(0);
  };
  EXPECT_EXIT(in_a_process(), testing::ExitedWithCode(same), "");
}

TEST(Calls, WhileAThreadEnds) {
  Results expected, found;
  std::thread([&] {
    thread_local AtEnd at_end;
    at_end.found = &found;
    expected = all_computed();
  }).join();
  EXPECT_EQ(found, expected);
}

}  // namespace
