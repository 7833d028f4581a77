// A process that has computed with several threads forks (as Python's multiprocessing and web servers do): the child
// computes the same, with several threads too, and does not wait for threads that it does not have.
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <random>
#include <vector>

#include <anyflash/anyflash.h>
#include <gtest/gtest.h>

namespace {

using anyflash::TensorView;

constexpr int threads = 4;
constexpr unsigned patience = 60;  // seconds

struct Results {
  std::vector<float> out, lse, dq, dk, dv;
  bool operator==(const Results&) const = default;
};

/// Forward and backward on work enough for all threads. No plan is kept for the rule's table, so one is made each time.
Results computed() {
  constexpr std::int64_t heads = 4, n = 512, d = 32;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> q(heads * n * d), k(q), v(q), dout(q);
  for (auto* x : {&q, &k, &v, &dout})
    for (auto& number : *x) number = normal(random);
  Results r{std::vector<float>(q.size()), std::vector<float>(heads * n), q, q, q};
  const auto view = [&](std::vector<float>& x) {
    return TensorView(x.data(), anyflash::ElementType::float32, {1, heads, n, d});
  };
  const TensorView lse(r.lse.data(), anyflash::ElementType::float32, {1, heads, n});
  std::vector<std::int32_t> ids(n);
  for (std::int64_t i = 0; i < n; ++i) ids[i] = static_cast<std::int32_t>(i / 200);
  const TensorView document(ids.data(), anyflash::ElementType::int32, {n});
  anyflash::Options options;
  options.rule = anyflash::documents(document, document);
  options.threads = threads;
  anyflash::forward(view(q), view(k), view(v), {view(r.out), lse, {}, {}}, options);
  anyflash::backward({view(dout), view(r.out), lse, {}}, view(q), view(k), view(v),
                     {view(r.dq), view(r.dk), view(r.dv), {}, {}}, options);
  return r;
}

int threads_of_this_process() {
  const std::filesystem::directory_iterator tasks("/proc/self/task"), end;
  return static_cast<int>(std::distance(tasks, end));
}

/// What the child says of a call: 0 all is well, 1 other numbers, 2 fewer threads, 100 and more: killed.
int child_of_fork(const Results& expected) {
  const auto child = fork();
  if (child == 0) {
    alarm(patience);
    const bool same = computed() == expected;
    _exit(!same ? 1 : threads_of_this_process() < threads ? 2 : 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

TEST(Fork, ChildComputesAsItsParentDid) {
  const auto expected = computed();
  EXPECT_EQ(child_of_fork(expected), 0);
  EXPECT_EQ(computed(), expected) << "the parent, after the fork";
  EXPECT_EQ(child_of_fork(expected), 0) << "the second child";
}

TEST(Fork, GrandchildComputesToo) {
  const auto expected = computed();
  const auto child = fork();
  if (child == 0) {
    alarm(2 * patience);
    _exit(computed() == expected ? child_of_fork(expected) : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
