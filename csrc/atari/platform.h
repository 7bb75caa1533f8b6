// SPDX-License-Identifier: Apache-2.0
// What differs between compilers: functions for host and device, and the SIMD that a
// function may use.
#pragma once

#if defined(__CUDACC__)
#define BEAST_HD __host__ __device__
#else
#define BEAST_HD
#endif

#if defined(__CUDA_ARCH__)
#define BEAST_ALWAYS_INLINE __forceinline__
#define BEAST_NOINLINE __noinline__
#define BEAST_LIKELY(condition) (condition)
#define BEAST_UNLIKELY(condition) (condition)
#else
#if defined(BEAST_SANITIZED)  // Their checks, inlined hundreds of times, take minutes.
#define BEAST_ALWAYS_INLINE inline
#else
#define BEAST_ALWAYS_INLINE inline __attribute__((always_inline))
#endif
#define BEAST_NOINLINE __attribute__((noinline))
#define BEAST_LIKELY(condition) __builtin_expect(!!(condition), 1)
#define BEAST_UNLIKELY(condition) __builtin_expect(!!(condition), 0)
#endif

// Drawing with AVX-512 or AVX2 is compiled in by GCC and Clang for x86 and chosen when
// the program runs; everywhere else the plain code draws.
#if defined(__x86_64__) && !defined(__CUDACC__)
#define BEAST_X86_SIMD 1
#endif
