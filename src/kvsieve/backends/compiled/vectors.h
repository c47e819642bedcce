// Sixteen floats at a time, in the vector extensions of GCC and Clang: the compiler splits them for narrower machines.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace kvsieve {

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline Floats load(const float* from) {
  Floats out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

inline Floats load(const BFloat16* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#else
  Halves bits;
  std::memcpy(&bits, from, sizeof bits);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
#endif
}

inline Floats load(const Float16* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
  Floats out;
#if defined(__F16C__)
  for (int half = 0; half < 2; ++half) {
    __m256 eight = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from + half));
    std::memcpy((float*)&out + 8 * half, &eight, sizeof eight);
  }
#else
  for (int i = 0; i < LANES; ++i) {
    _Float16 one;
    std::memcpy(&one, from + i, sizeof one);
    out[i] = (float)one;
  }
#endif
  return out;
#endif
}

// The first `count` of sixteen, zeros behind them: what lies there is never read.
template <class T>
inline Floats load_part(const T* from, int count) {
  T buffer[LANES] = {};
  std::memcpy(buffer, from, count * sizeof(T));
  return load(buffer);
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

inline void put(float* to, float value) { *to = value; }

// Round to nearest, ties to even; a NaN stays one.
inline void put(BFloat16* to, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  to->bits = value != value ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline void put(Float16* to, float value) {
  _Float16 half = (_Float16)value;
  std::memcpy(to, &half, sizeof half);
}

inline Floats fill(float value) { return Floats{} + value; }

inline float sum(Floats x) {
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  Eight low, high;
  std::memcpy(&low, &x, 32);
  std::memcpy(&high, (const char*)&x + 32, 32);
  low += high;
  Four a, b;
  std::memcpy(&a, &low, 16);
  std::memcpy(&b, (const char*)&low + 16, 16);
  a += b;
  return (a[0] + a[2]) + (a[1] + a[3]);
}

#if defined(__clang__)
#define KVSIEVE_MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define KVSIEVE_MIX(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif

// The sums of four vectors, side by side: half the work of four sums.
inline void sum_four(Floats x, Floats y, Floats z, Floats w, float* to) {
  const auto pairs = [](Floats a, Floats b) -> Floats {
    return KVSIEVE_MIX(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           KVSIEVE_MIX(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  };
  const Floats a = pairs(x, y), b = pairs(z, w);
  const Floats four = KVSIEVE_MIX(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                      KVSIEVE_MIX(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  typedef float Four __attribute__((vector_size(16)));
  Four parts[4];
  std::memcpy(parts, &four, sizeof parts);
  const Four out = (parts[0] + parts[2]) + (parts[1] + parts[3]);
  std::memcpy(to, &out, sizeof out);
}

// exp of x <= 0, within two units in the last place; 0 below the smallest normal number, NaN for NaN.
// Range reduction by ln 2 in two parts, then the polynomial of the Cephes library (S. Moshier).
inline Floats exp_negative(Floats x) {
  const Ints below = x < -87.0f;
  const Floats clipped = below ? fill(-87.0f) : x;
  const Floats shifted = clipped * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2**23: rounds to an integer
  const Floats n = shifted - 12582912.0f;
  Floats f = clipped - n * 0.693359375f;
  f = f - n * -2.12194440e-4f;
  Floats p = f * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * (f * f) + f + 1.0f;
  const Ints power = ((Ints)shifted - 0x4B400000 + 127) << 23;
  const Floats out = p * (Floats)power;
  return below ? fill(0.0f) : out;
}

}  // namespace kvsieve
