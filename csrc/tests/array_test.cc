// SPDX-License-Identifier: Apache-2.0
#include "array.h"

#include <limits>

#include "arrays.h"
#include "check.h"

namespace beast::test {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

// A transposed view: dimensions and strides in the other order.
Array transposed(const Array& array) {
  Array result = array;
  const size_t rank = array.shape.rank();
  for (size_t i = 0; i < rank; ++i) {
    result.shape[i] = array.shape[rank - 1 - i];
    result.strides[i] = array.strides[rank - 1 - i];
  }
  return result;
}

// The elements along dim from the last to the first, as numpy's a[::-1].
Array reversed(const Array& array, size_t dim) {
  Array result = array;
  result.data += (array.shape[dim] - 1) * array.strides[dim];
  result.strides[dim] = -array.strides[dim];
  return result;
}

// Every second element along dim, as numpy's a[::2].
Array every_second(const Array& array, size_t dim) {
  Array result = array;
  result.shape[dim] = (array.shape[dim] + 1) / 2;
  result.strides[dim] = 2 * array.strides[dim];
  return result;
}

template <class T>
std::vector<T> copied(const Array& source) {
  Array target = array_of<T>(source.shape, std::vector<T>(source.shape.num_elements()));
  copy(source, target);
  return values<T>(target);
}

TEST(shapes_are_written_as_python_writes_them) {
  CHECK_EQ(Shape({81, 32, 4}).str(), "(81, 32, 4)");
  CHECK_EQ(Shape({5}).str(), "(5,)");
  CHECK_EQ(Shape{}.str(), "()");
}

TEST(shapes_compare_by_rank_and_dimensions) {
  CHECK(Shape({2, 3}) == Shape({2, 3}));
  CHECK(!(Shape({2, 3}) == Shape({2, 3, 1})));
  CHECK(!(Shape({2, 3}) == Shape({3, 2})));
  CHECK_EQ(Shape{}.num_elements(), 1);
  CHECK_EQ(Shape({2, 0, 3}).num_elements(), 0);
}

TEST(more_than_eight_dimensions_are_refused) {
  const std::vector<int64_t> nine(9, 1), eight(8, 1);
  CHECK_EQ(Shape(eight).rank(), 8);
  CHECK_THROWS(std::invalid_argument, Shape(nine), "at most 8 dimensions here, got 9");
  CHECK_THROWS(std::invalid_argument, counting<uint8_t>(Shape(eight)).unsqueeze(0),
               "too many dimensions");
}

TEST(dtypes_have_numpys_names_and_sizes) {
  CHECK_EQ(name(DType::kBFloat16), "bfloat16");
  CHECK(dtype_from_name("float32") == DType::kFloat32);
  CHECK(!dtype_from_name("").has_value());
  CHECK(!dtype_from_name("complex64").has_value());
  for (int number = 1; number <= 13; ++number) {
    const auto dtype = dtype_from_number(number);
    CHECK(dtype.has_value());
    CHECK(dtype_from_name(name(*dtype)) == dtype);
    CHECK(itemsize(*dtype) > 0);
  }
}

TEST(dtype_numbers_that_are_not_listed_are_refused) {
  for (int64_t number : {int64_t{0}, int64_t{14}, int64_t{-1}, int64_t{257}, kMax}) {
    CHECK(!dtype_from_number(number).has_value());
  }
}

TEST(contiguous_arrays_know_it) {
  const Array array = counting<int32_t>({2, 3, 4});
  CHECK_EQ(array.strides, Shape({48, 16, 4}));
  CHECK_EQ(array.num_bytes(), 96);
  CHECK(array.is_contiguous());
  CHECK(counting<int32_t>({}).is_contiguous());
  CHECK(!transposed(array).is_contiguous());
  CHECK(!reversed(array, 0).is_contiguous());
  CHECK(!array.narrow(1, 0, 2).is_contiguous());
  CHECK(array.narrow(0, 1, 2).is_contiguous());
  CHECK(every_second(counting<int32_t>({3, 0, 2}), 2).is_contiguous());
}

TEST(the_stride_of_a_dimension_of_one_does_not_matter) {
  Array array = counting<int32_t>({3, 1, 2});
  array.strides[1] = 12345;
  CHECK(array.is_contiguous());
  CHECK_EQ(copied<int32_t>(array), (std::vector<int32_t>{0, 1, 2, 3, 4, 5}));
}

TEST(narrow_is_a_view_of_a_part) {
  const Array array = counting<int64_t>({2, 4});
  const Array part = array.narrow(1, 1, 3);
  CHECK_EQ(part.shape, Shape({2, 2}));
  CHECK_EQ(values<int64_t>(part), (std::vector<int64_t>{1, 2, 5, 6}));
  CHECK(part.owner == array.owner);
  CHECK_EQ(array.narrow(0, 1, 1).num_bytes(), 0);
}

TEST(select_drops_the_first_dimension) {
  const Array array = counting<int64_t>({3, 2});
  const Array row = array.select(2);
  CHECK_EQ(row.shape, Shape({2}));
  CHECK_EQ(values<int64_t>(row), (std::vector<int64_t>{4, 5}));
  CHECK_EQ(values<int64_t>(row.select(1)), (std::vector<int64_t>{5}));
  CHECK_EQ(row.select(1).shape.rank(), 0);
}

TEST(unsqueeze_keeps_the_elements_and_stays_contiguous) {
  const Array array = counting<int64_t>({2, 3});
  for (size_t at = 0; at <= 2; ++at) {
    const Array result = array.unsqueeze(at);
    CHECK_EQ(result.shape.rank(), 3);
    CHECK_EQ(result.shape[at], 1);
    CHECK(result.is_contiguous());
    CHECK_EQ(values<int64_t>(result), values<int64_t>(array));
    CHECK_EQ(copied<int64_t>(result), values<int64_t>(array));
  }
  CHECK_EQ(counting<int64_t>({}).unsqueeze(0).shape, Shape({1}));
}

TEST(move_keeps_the_elements_and_changes_their_order) {
  const Array array = counting<int64_t>({2, 3, 4});
  const Array moved = array.move(0, 2);
  CHECK_EQ(moved.shape, Shape({3, 4, 2}));
  CHECK_EQ(values<int64_t>(moved.select(0)),
           (std::vector<int64_t>{0, 12, 1, 13, 2, 14, 3, 15}));
  CHECK_EQ(values<int64_t>(moved.move(2, 0)), values<int64_t>(array));
  CHECK_EQ(array.move(1, 1).shape, array.shape);
}

TEST(images_know_whether_they_are_channels_last) {
  const Array memory = counting<int16_t>({2, 5, 4, 3});  // [K, H, W, C]
  const Array images = memory.move(3, 1);
  CHECK(images.is_channels_last());
  CHECK(!images.is_contiguous());
  CHECK(images.narrow(0, 1, 2).is_channels_last());
  CHECK(!images.narrow(1, 0, 2).is_channels_last());
  CHECK(!images.narrow(3, 0, 2).is_channels_last());
  CHECK(!memory.is_channels_last());
  // One channel is either.
  CHECK(!counting<int16_t>({2, 5, 4, 1}).move(3, 1).is_channels_last());
  CHECK(!counting<int16_t>({2, 0, 4, 3}).move(3, 1).is_channels_last());
  CHECK(!counting<int16_t>({5, 4}).is_channels_last());
}

TEST(copies_are_exact_whatever_the_strides) {
  const Array array = counting<int16_t>({4, 6, 5});
  const std::vector<Array> views{
      array,
      transposed(array),
      reversed(array, 0),
      reversed(array, 1),
      reversed(array, 2),
      every_second(array, 0),
      every_second(array, 2),
      every_second(reversed(transposed(array), 1), 0),
      array.narrow(1, 2, 5),
      array.narrow(0, 1, 2).narrow(2, 3, 4),
      array.select(3).select(5),
      array.select(3).select(5).select(4),
  };
  for (const Array& view : views) {
    CHECK_EQ(copied<int16_t>(view), values<int16_t>(view));
  }
}

TEST(copies_into_strided_memory_leave_the_gaps_alone) {
  const Array target = array_of<int32_t>({3, 4}, std::vector<int32_t>(12, -1));
  copy(counting<int32_t>({3, 2}), target.narrow(1, 1, 3));
  CHECK_EQ(values<int32_t>(target),
           (std::vector<int32_t>{-1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1}));
  copy(counting<int32_t>({2, 4}, 100), reversed(every_second(target, 0), 0));
  CHECK_EQ(values<int32_t>(target), (std::vector<int32_t>{104, 105, 106, 107, -1, 2, 3,
                                                          -1, 100, 101, 102, 103}));
}

TEST(a_broadcast_source_of_stride_zero_is_repeated) {
  Array row = counting<int32_t>({1, 3});
  row.shape[0] = 2;
  row.strides[0] = 0;
  CHECK_EQ(copied<int32_t>(row), (std::vector<int32_t>{0, 1, 2, 0, 1, 2}));
}

TEST(copies_of_nothing_touch_nothing) {
  const Array empty = Array::contiguous(DType::kFloat32, {3, 0, 2}, nullptr, nullptr);
  copy(empty, empty);
  copy(empty.narrow(0, 1, 2), empty.narrow(0, 2, 3));
}

TEST(rows_are_copied_along_any_dimension_whatever_the_strides) {
  const Array array = counting<int32_t>({4, 5, 6});
  for (const Array& source : {array, transposed(array), reversed(array, 1)}) {
    for (size_t dim = 0; dim < 3; ++dim) {
      Shape shape = source.shape;
      shape[dim] = 9;
      const Array whole =
          array_of<int32_t>(shape, std::vector<int32_t>(shape.num_elements(), -1));
      for (const Array& target : {whole, reversed(whole, 0)}) {
        copy_rows(source, 1, 3, target, 5, dim);
        CHECK_EQ(values<int32_t>(target.narrow(dim, 5, 7)),
                 values<int32_t>(source.narrow(dim, 1, 3)));
        for (const Array& rest : {target.narrow(dim, 0, 5), target.narrow(dim, 7, 9)}) {
          for (int32_t value : values<int32_t>(rest)) CHECK_EQ(value, -1);
        }
        copy(array_of<int32_t>(shape, std::vector<int32_t>(shape.num_elements(), -1)),
             target);
      }
    }
  }
}

TEST(rows_without_elements_are_copied_in_no_time) {
  const int64_t many = int64_t{1} << 40;
  const Array empty =
      Array::contiguous(DType::kFloat32, {many, 3, 0}, nullptr, nullptr);
  copy_rows(empty, 0, 2, empty, 1, 1);
  CHECK_EQ(empty.num_bytes(), 0);
}

TEST(no_stride_is_zero_or_overflows) {
  const Array empty =
      Array::contiguous(DType::kFloat32, {kMax, kMax, 0, 3}, nullptr, nullptr);
  for (int64_t stride : empty.strides.dims()) CHECK(stride > 0);
}

TEST(copies_between_dtypes_or_shapes_are_refused) {
  CHECK_THROWS(std::invalid_argument,
               copy(counting<int32_t>({2}), counting<float>({2})),
               "int32(2,) into float32(2,)");
  CHECK_THROWS(std::invalid_argument,
               copy(counting<int32_t>({2, 3}), counting<int32_t>({3, 2})),
               "int32(2, 3) into int32(3, 2)");
}

std::optional<size_t> bytes(DType dtype, std::vector<int64_t> dims) {
  return checked_num_bytes(dtype, dims);
}

TEST(checked_num_bytes_multiplies) {
  CHECK(bytes(DType::kFloat32, {2, 3}) == 24u);
  CHECK(bytes(DType::kFloat64, {}) == 8u);
  CHECK(bytes(DType::kUInt8, {4, 0, 5}) == 0u);
  CHECK(bytes(DType::kUInt8, {kMax}) == static_cast<size_t>(kMax));
}

TEST(checked_num_bytes_refuses_overflow_and_negatives) {
  CHECK(!bytes(DType::kUInt16, {kMax}));
  CHECK(!bytes(DType::kUInt8, {int64_t{1} << 32, int64_t{1} << 32}));
  CHECK(!bytes(DType::kFloat64, {int64_t{1} << 60}));
  CHECK(!bytes(DType::kUInt8, {-1}));
  CHECK(!bytes(DType::kUInt8, {-1, -1}));
  CHECK(!bytes(DType::kUInt8, {0, -1}));
  CHECK(!bytes(DType::kUInt8, {std::numeric_limits<int64_t>::min()}));
  CHECK(!bytes(DType::kUInt8, {kMax, kMax, 0}));  // The zero hides nothing.
  CHECK(!bytes(DType::kUInt8, std::vector<int64_t>(9, 1)));
}

}  // namespace
}  // namespace beast::test
