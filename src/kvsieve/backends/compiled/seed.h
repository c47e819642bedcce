// Decayed column sums of the causal attention of consecutive prompt queries of one request.
//
// A block of query rows meets all tokens before it: logits, exponentials, then one pass down the columns. Blocks are
// dealt to a fixed number of shares per KV head, each with its own sums that are added up in order, so results do not
// depend on threads; memory grows with the length only.
#pragma once

#include "chunk.h"

namespace kvsieve {

struct Seeding {
  int64_t heads, group, width, page_size, rows, length;  // the last `rows` of `length` tokens are the queries
  const void* q;
  int64_t q_row, q_head, q_group;  // strides; the last axis is dense
  const void* k;                   // [heads, blocks, page_size, width]; a page is dense
  int64_t head_step, block_step;   // in pages
  const int64_t* table;  // [pages]
  const float* weights;  // [rows]
  const float* sinks;    // [heads, group] or null
  double scale, softcap;
  int64_t reduction;
  float* out;  // [heads, length]
};

constexpr int64_t BLOCK_ROWS = 8, SHARES = 8, TOKENS_AT_ONCE = 64;

// Memory of a thread: queries [BLOCK_ROWS * group, padded] and their logits [BLOCK_ROWS * group, stride].
struct SeedScratch {
  std::vector<int64_t> places;
  std::vector<float> q, logits, factors;
  int64_t padded, stride;

  explicit SeedScratch(const Seeding& s) : padded(round_up(s.width)), stride(round_up(s.length) + LANES) {
    places.resize(s.length);
    q.resize(BLOCK_ROWS * s.group * padded);
    logits.resize(BLOCK_ROWS * s.group * stride);
    factors.resize(BLOCK_ROWS * s.group);
  }
};

inline void find_places(const Seeding& s, int64_t h, int64_t* places) {
  for (int64_t t = 0; t < s.length; ++t)
    places[t] = (h * s.head_step + s.table[t / s.page_size] * s.block_step) * s.page_size + t % s.page_size;
}

template <class T>
void load_queries(const Seeding& s, int64_t h, int64_t first, int64_t rows, SeedScratch& scratch) {
  for (int64_t i = 0; i < rows * s.group; ++i) {
    const T* from = (const T*)s.q + (first + i / s.group) * s.q_row + h * s.q_head + i % s.group * s.q_group;
    for (int64_t d = 0; d < s.width; d += LANES)
      store(scratch.q.data() + i * scratch.padded + d,
            s.width - d < LANES ? load_part(from + d, (int)(s.width - d)) : load(from + d));
  }
}

// Logits of ROWS queries with tokens [first, last).
template <class T, int ROWS>
void dot_rows(const Seeding& s, SeedScratch& scratch, int64_t row, int64_t first, int64_t last) {
  const float* q = scratch.q.data() + row * scratch.padded;
  float* logits = scratch.logits.data() + row * scratch.stride;
  const int64_t* places = scratch.places.data();
  int64_t t = first;
  for (; t + 4 <= last; t += 4)
    dot_tokens<T, ROWS, 4>(q, scratch.padded, (const T*)s.k, places + t, s.width, logits + t, scratch.stride);
  for (; t < last; ++t)
    dot_tokens<T, ROWS, 1>(q, scratch.padded, (const T*)s.k, places + t, s.width, logits + t, scratch.stride);
}

template <class T>
void dot_block(const Seeding& s, SeedScratch& scratch, int64_t queries, int64_t tokens) {
  for (int64_t first = 0; first < tokens; first += TOKENS_AT_ONCE) {
    const int64_t last = std::min(first + TOKENS_AT_ONCE, tokens);
    int64_t row = 0;
    for (; row + 4 <= queries; row += 4) dot_rows<T, 4>(s, scratch, row, first, last);
    for (; row < queries; ++row) dot_rows<T, 1>(s, scratch, row, first, last);
  }
}

// Logits of one query become exponentials over the tokens it sees, 0 behind them up to `padded`; returns what makes
// probabilities of them.
inline float exponentials_of(const Seeding& s, const Attention& a, int64_t h, int64_t g, float* logits, int64_t seen,
                             int64_t padded) {
  float top;
  const float total = exponentials(logits, seen, a, &top);
  std::fill(logits + seen, logits + padded, 0.0f);
  if (!s.sinks) return 1.0f / total;
  const float sink = s.sinks[h * s.group + g], shift = std::max(top, sink), weight = std::exp(top - shift);
  return weight / (total * weight + std::exp(sink - shift));
}

// Adds a block's probabilities, reduced over the group and weighted by row, to sums [padded].
inline void add_block(const Seeding& s, const SeedScratch& scratch, const float* weights, int64_t rows, int64_t padded,
                      float* sums) {
  for (int64_t t = 0; t < padded; t += LANES) {
    Floats total = {};
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = scratch.logits.data() + r * s.group * scratch.stride + t;
      const float* factors = scratch.factors.data() + r * s.group;
      Floats received = load(from) * factors[0];
      for (int64_t g = 1; g < s.group; ++g) {
        const Floats x = load(from + g * scratch.stride) * factors[g];
        if (s.reduction == MAX)
          received = (x > received) | (x != x) ? x : received;  // a NaN stays one
        else
          received += x;
      }
      total += received * weights[r];
    }
    store(sums + t, load(sums + t) + total);
  }
}

template <class T>
void seed_block(const Seeding& s, const Attention& a, int64_t h, int64_t first, SeedScratch& scratch, float* sums) {
  const int64_t rows = std::min(BLOCK_ROWS, s.rows - first), before = s.length - s.rows + first;
  const int64_t tokens = before + rows, padded = round_up(tokens);
  load_queries<T>(s, h, first, rows, scratch);
  dot_block<T>(s, scratch, rows * s.group, tokens);
  for (int64_t i = 0; i < rows * s.group; ++i) {
    float* logits = scratch.logits.data() + i * scratch.stride;
    scratch.factors[i] = exponentials_of(s, a, h, i % s.group, logits, before + i / s.group + 1, padded);
    if (s.reduction == MEAN) scratch.factors[i] /= (float)s.group;
  }
  add_block(s, scratch, s.weights + first, rows, padded, sums);
}

template <class T>
void seed(const Seeding& s) {
  const int64_t size = round_up(s.length), work = s.heads * SHARES;
  std::vector<float> sums(work * size);
  Attention a = {};
  a.scale = s.scale, a.softcap = s.softcap;
#pragma omp parallel
  {
    SeedScratch scratch(s);
#pragma omp for schedule(dynamic, 1)
    for (int64_t w = 0; w < work; ++w) {
      find_places(s, w / SHARES, scratch.places.data());
      for (int64_t first = w % SHARES * BLOCK_ROWS; first < s.rows; first += SHARES * BLOCK_ROWS)
        seed_block<T>(s, a, w / SHARES, first, scratch, sums.data() + w * size);
    }
#pragma omp for schedule(static)
    for (int64_t h = 0; h < s.heads; ++h)
      for (int64_t t = 0; t < s.length; ++t) {
        float total = 0.0f;
        for (int64_t share = 0; share < SHARES; ++share) total += sums[(h * SHARES + share) * size + t];
        s.out[h * s.length + t] = total;
      }
  }
}

}  // namespace kvsieve
