// SPDX-License-Identifier: Apache-2.0
#include "episode_counter.h"

#include <random>

#include "check.h"

namespace beast::test {
namespace {

// What one environment says in a step.
struct Said {
  float reward = 0;
  bool terminated = false;
  bool truncated = false;
  bool game_over = true;
  float carried_return = 0;
  int32_t carried_steps = 0;
};

// What the row then says, and the reward that is left.
struct Row {
  bool first;
  float reward;
  float episode_return;
  int32_t episode_step;

  bool operator==(const Row&) const = default;
  std::string str() const {
    return "first=" + std::to_string(first) + " reward=" + std::to_string(reward) +
           " return=" + std::to_string(episode_return) +
           " step=" + std::to_string(episode_step);
  }
};

std::vector<Row> update_all(EpisodeCounter& counter, const std::vector<Said>& all) {
  EnvOutput output(static_cast<int64_t>(all.size()));
  for (size_t k = 0; k < all.size(); ++k) {
    output.reward[k] = all[k].reward;
    output.terminated[k] = all[k].terminated;
    output.truncated[k] = all[k].truncated;
    output.game_over[k] = all[k].game_over;
    output.carried_return[k] = all[k].carried_return;
    output.carried_steps[k] = all[k].carried_steps;
  }
  counter.update(output);
  std::vector<Row> rows;
  for (size_t k = 0; k < all.size(); ++k) {
    rows.push_back({counter.first()[k] != 0, output.reward[k],
                    counter.episode_return()[k], counter.episode_step()[k]});
  }
  return rows;
}

Row update(EpisodeCounter& counter, const Said& said) {
  return update_all(counter, {said})[0];
}

TEST(the_first_row_begins_an_episode_and_earns_nothing) {
  EpisodeCounter counter(1);
  CHECK_EQ(update(counter, {.reward = 7}), (Row{true, 0, 0, 0}));
  CHECK_EQ(update(counter, {.reward = 2}), (Row{false, 2, 2, 1}));
}

TEST(the_last_row_has_the_whole_return_and_the_next_begins_anew) {
  for (bool is_truncated : {false, true}) {
    EpisodeCounter counter(1);
    update(counter, Said{});
    CHECK_EQ(update(counter, {.reward = 1}), (Row{false, 1, 1, 1}));
    CHECK_EQ(
        update(counter,
               {.reward = 2, .terminated = !is_truncated, .truncated = is_truncated}),
        (Row{false, 2, 3, 2}));
    CHECK_EQ(update(counter, {.reward = 9}), (Row{true, 0, 0, 0}));
    CHECK_EQ(update(counter, {.reward = 4}), (Row{false, 4, 4, 1}));
  }
}

TEST(lives_of_a_game_are_counted_together) {
  EpisodeCounter counter(1);
  update(counter, Said{});
  CHECK_EQ(update(counter, {.reward = 1, .terminated = true, .game_over = false}),
           (Row{false, 1, 1, 1}));
  CHECK_EQ(update(counter, {.reward = 5}), (Row{true, 0, 1, 1}));  // The next life.
  CHECK_EQ(update(counter, {.reward = 2, .terminated = true, .game_over = true}),
           (Row{false, 2, 3, 2}));
  CHECK_EQ(update(counter, Said{}), (Row{true, 0, 0, 0}));
}

TEST(game_over_means_nothing_where_no_episode_ended) {
  EpisodeCounter counter(1);
  update(counter, {.game_over = false});
  CHECK_EQ(update(counter, {.reward = 1, .game_over = true}), (Row{false, 1, 1, 1}));
  CHECK_EQ(update(counter, {.reward = 1, .game_over = true}), (Row{false, 1, 2, 2}));
}

TEST(what_no_row_shows_is_counted_too) {
  EpisodeCounter counter(1);
  CHECK_EQ(update(counter, {.carried_return = 3, .carried_steps = 30}),
           (Row{true, 0, 3, 30}));
  CHECK_EQ(update(counter, {.reward = 1, .terminated = true}), (Row{false, 1, 4, 31}));
  CHECK_EQ(update(counter, {.reward = 1, .carried_return = 2, .carried_steps = 5}),
           (Row{true, 0, 2, 5}));
}

TEST(an_episode_may_end_in_its_first_row) {
  EpisodeCounter counter(1);
  CHECK_EQ(update(counter, {.terminated = true}), (Row{true, 0, 0, 0}));
  CHECK_EQ(update(counter, {.reward = 1}), (Row{true, 0, 0, 0}));
}

// The definition, slowly: sums over all that was said since the game began.
TEST(random_games_of_many_environments_count_as_defined) {
  constexpr int64_t kNumEnvs = 5;
  std::mt19937_64 random(1);
  EpisodeCounter counter(kNumEnvs);
  std::vector<std::vector<Said>> said(kNumEnvs);  // Each environment's rows.
  for (int t = 0; t < 2000; ++t) {
    for (auto& history : said) {
      const bool may_end = random() % 4 == 0;
      history.push_back({.reward = static_cast<float>(random() % 10),
                         .terminated = may_end && random() % 2 == 0,
                         .truncated = may_end && random() % 2 == 0,
                         .game_over = random() % 3 == 0,
                         .carried_return = static_cast<float>(random() % 2),
                         .carried_steps = static_cast<int32_t>(random() % 2)});
    }
    std::vector<Said> now;
    for (const auto& history : said) now.push_back(history.back());
    const std::vector<Row> rows = update_all(counter, now);
    for (int64_t k = 0; k < kNumEnvs; ++k) {
      const std::vector<Said>& history = said[k];
      auto has_ended = [&](size_t i) {
        return history[i].terminated || history[i].truncated;
      };
      auto is_first = [&](size_t i) { return i == 0 || has_ended(i - 1); };
      size_t begin = history.size() - 1;
      while (begin > 0 && !(has_ended(begin - 1) && history[begin - 1].game_over)) {
        --begin;
      }
      Row expected{is_first(history.size() - 1), 0, 0, 0};
      for (size_t i = begin; i < history.size(); ++i) {
        expected.reward = is_first(i) ? 0 : history[i].reward;
        expected.episode_return += expected.reward + history[i].carried_return;
        expected.episode_step += !is_first(i) + history[i].carried_steps;
      }
      CHECK_EQ(rows[k], expected);
    }
  }
}

}  // namespace
}  // namespace beast::test
