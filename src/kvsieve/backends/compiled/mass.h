// Attention mass as it is stored: rows of pages per KV head, and a sum beside each row where pages are ranked by it.
#pragma once

#include <cstdint>

namespace kvsieve {

struct Crediting {
  int64_t batch, heads, listed, page_size;
  int64_t head_step, row_step;  // from one head or row to the next, in rows
  const int64_t* table;  // [batch, pages]: state rows
  int64_t table_batch;
  const int64_t* pages;  // [batch, heads, listed], ascending
  int64_t pages_batch, pages_head;
  const int64_t *counts, *lengths;  // [batch]
  const float* units;               // [batch]: stored value of a mass of 1
  const float* factors;             // [batch]: what stored mass is multiplied by beforehand; null: nothing is
  const float* increment;           // [batch, heads, listed, page_size], dense
  float *mass, *sums;               // [heads, rows, page_size], and [heads, rows] or null; a row is dense
};

// Multiplies all stored mass of a segment. Mass is never negative: a page whose sum is 0 holds none.
inline void rebase(const Crediting& c, int64_t b, int64_t h, float factor) {
  const int64_t* table = c.table + b * c.table_batch;
  const int64_t pages = (c.lengths[b] + c.page_size - 1) / c.page_size;
  for (int64_t page = 0; page < pages; ++page) {
    const int64_t row = h * c.head_step + table[page] * c.row_step;
    if (c.sums && c.sums[row] == 0.0f) continue;
    if (c.sums) c.sums[row] *= factor;
    for (int64_t t = 0; t < c.page_size; ++t) c.mass[row * c.page_size + t] *= factor;
  }
}

inline void credit_segment(const Crediting& c, int64_t b, int64_t h) {
  if (c.factors && c.factors[b] != 1.0f) rebase(c, b, h, c.factors[b]);
  const int64_t* pages = c.pages + b * c.pages_batch + h * c.pages_head;
  const float* increment = c.increment + (b * c.heads + h) * c.listed * c.page_size;
  for (int64_t i = 0; i < c.counts[b]; ++i, increment += c.page_size) {
    const int64_t row = h * c.head_step + c.table[b * c.table_batch + pages[i]] * c.row_step;
    float* mass = c.mass + row * c.page_size;
    float sum = 0.0f;
    for (int64_t t = 0; t < c.page_size; ++t) {
      const float value = increment[t] * c.units[b];
      mass[t] += value;
      sum += value;
    }
    if (c.sums) c.sums[row] += sum;
  }
}

inline void credit(const Crediting& c) {
  const int64_t segments = c.batch * c.heads;
#pragma omp parallel for schedule(static) if (segments * c.listed * c.page_size > 1 << 16)
  for (int64_t s = 0; s < segments; ++s) credit_segment(c, s / c.heads, s % c.heads);
}

}  // namespace kvsieve
