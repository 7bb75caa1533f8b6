// SPDX-License-Identifier: Apache-2.0
#include "nest.h"

#include "arrays.h"
#include "check.h"

namespace beast::test {
namespace {

Nest number(int64_t value) { return rows(value, 1); }

// {action: *, observation: {image: *, more: (*, *)}} with leaves 1, 2, 3, 4; the keys
// are given out of order.
Nest example() {
  return Nest::dict(
      {{"observation", Nest::dict({{"more", Nest::tuple({number(3), number(4)})},
                                   {"image", number(2)}})},
       {"action", number(1)}});
}

std::vector<int64_t> all_ints(const Nest& nest) {
  std::vector<int64_t> all;
  for (size_t i = 0; i < nest.leaves.size(); ++i) all.push_back(ints(nest, i).at(0));
  return all;
}

TEST(dict_keys_are_sorted_and_leaves_follow_them) {
  const Nest nest = example();
  CHECK_EQ(nest.structure->str(), "{action: *, observation: {image: *, more: (*, *)}}");
  CHECK_EQ(all_ints(nest), (std::vector<int64_t>{1, 2, 3, 4}));
  CHECK_EQ(nest.structure->num_leaves(), 4);
}

TEST(keys_sort_by_bytes_so_that_every_language_agrees) {
  const Nest nest = Nest::dict({{"b", number(3)}, {"a", number(2)}, {"B", number(1)}});
  CHECK_EQ(nest.structure->keys(), (std::vector<std::string>{"B", "a", "b"}));
  CHECK_EQ(all_ints(nest), (std::vector<int64_t>{1, 2, 3}));
}

TEST(paths_name_the_leaves) {
  const Nest nest = Nest::tuple({example(), number(5)});
  CHECK_EQ(example().structure->path(0), "action");
  CHECK_EQ(example().structure->path(1), "observation.image");
  CHECK_EQ(example().structure->path(3), "observation.more[1]");
  CHECK_EQ(nest.structure->path(1), "[0].observation.image");
  CHECK_EQ(nest.structure->path(4), "[1]");
  CHECK_EQ(Structure::leaf()->path(0), "the array");
}

TEST(paths_step_over_parts_without_leaves) {
  const Nest nest = Nest::tuple({Nest::tuple({}), Nest::dict({}), number(1)});
  CHECK_EQ(nest.structure->num_leaves(), 1);
  CHECK_EQ(nest.structure->path(0), "[2]");
  CHECK_EQ(nest.structure->str(), "((), {}, *)");
}

TEST(a_tuple_of_one_is_written_with_a_comma) {
  CHECK_EQ(Nest::tuple({number(1)}).structure->str(), "(*,)");
}

TEST(a_key_given_twice_is_refused) {
  CHECK_THROWS(std::invalid_argument, Nest::dict({{"a", number(1)}, {"a", number(2)}}),
               "the key \"a\" twice");
}

TEST(at_gives_the_part_with_its_leaves) {
  const Nest nest = example();
  CHECK_EQ(all_ints(nest.at("action")), (std::vector<int64_t>{1}));
  CHECK_EQ(all_ints(nest.at("observation")), (std::vector<int64_t>{2, 3, 4}));
  CHECK_EQ(all_ints(nest.at("observation").at("more").at(1)),
           (std::vector<int64_t>{4}));
  CHECK(nest.at("action").structure->kind() == Structure::Kind::kLeaf);
}

TEST(at_names_what_is_missing_and_what_is_there) {
  CHECK_THROWS(std::out_of_range, example().at("reward"),
               "no \"reward\" in {action: *, observation:");
  CHECK_THROWS(std::out_of_range, example().at("observation").at("more").at(2),
               "no part 2 in (*, *)");
  CHECK_THROWS(std::out_of_range, number(1).at("a"), "no \"a\" in *");
  CHECK_THROWS(std::out_of_range, number(1).at(size_t{0}), "no part 0 in *");
}

TEST(structures_are_equal_by_kind_keys_and_children) {
  const auto leaf = Structure::leaf();
  CHECK(example().structure->equals(*example().structure));
  CHECK(!leaf->equals(*Structure::tuple({leaf})));
  CHECK(!Structure::dict({{"a", leaf}})->equals(*Structure::dict({{"b", leaf}})));
  CHECK(!Structure::tuple({leaf})->equals(*Structure::dict({{"a", leaf}})));
  CHECK(!Structure::tuple({})->equals(*Structure::dict({})));
  CHECK(!Structure::tuple({leaf, Structure::tuple({leaf, leaf})})
             ->equals(*Structure::tuple({Structure::tuple({leaf, leaf}), leaf})));
}

TEST(narrow_cuts_every_leaf) {
  const Nest nest = Nest::tuple({rows(0, 5), rows(10, 5)});
  const Nest part = nest.narrow(0, 1, 3);
  CHECK_EQ(ints(part, 0), (std::vector<int64_t>{1, 2}));
  CHECK_EQ(ints(part, 1), (std::vector<int64_t>{11, 12}));
  CHECK(part.structure == nest.structure);
}

}  // namespace
}  // namespace beast::test
