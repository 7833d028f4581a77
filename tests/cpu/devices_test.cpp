// What a program can learn and say about the machine that its calls run on.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <anyflash/anyflash.h>
#include <gtest/gtest.h>

namespace {

using namespace anyflash;

TEST(Devices, TheCpuIsOne) {
  const auto all = devices();
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(all[0].device, Device{});
  EXPECT_EQ(device_name(all[0].device), "cpu");
  EXPECT_FALSE(all[0].model.empty());
  EXPECT_GE(all[0].threads, 1);
}

TEST(Devices, TooMuchMemoryIsAnError) {
  for (const auto bytes : {SIZE_MAX, SIZE_MAX - 15, SIZE_MAX / 2})  // more, and a sanitizer ends the program
    EXPECT_THROW(device_memory({}, bytes), Error) << bytes;
  EXPECT_NE(device_memory({}, 0), nullptr);
  synchronize_device({});
}

std::vector<float> numbers_of_a_call() {
  std::vector<float> q(16 * 16), out(16 * 16);
  for (int i = 0; i < 256; ++i) q[i] = static_cast<float>(i * i % 101) / 50 - 1;
  const TensorView x(q.data(), ElementType::float32, {1, 1, 16, 16});
  forward(x, x, x, {TensorView(out.data(), ElementType::float32, {1, 1, 16, 16}), {}, {}, {}});
  return out;
}

TEST(InstructionSets, AreUsedAsChosen) {
  const auto names = instruction_sets();
  ASSERT_FALSE(names.empty());
  const std::string first = instruction_set();
  const auto expected = numbers_of_a_call();
  for (const char* name : names) {
    use_instruction_set(name);
    EXPECT_STREQ(instruction_set(), name);
    EXPECT_EQ(instruction_sets(), names) << "the list stays whole";
    const auto numbers = numbers_of_a_call();
    for (std::size_t i = 0; i < numbers.size(); ++i) ASSERT_NEAR(numbers[i], expected[i], 1e-6) << name;
  }
  EXPECT_THROW(use_instruction_set("Z80"), Error);
  EXPECT_STREQ(instruction_set(), names.back()) << "an error changes nothing";
  use_instruction_set("");
  EXPECT_STREQ(instruction_set(), names.front());
  use_instruction_set(first);
}

}  // namespace
