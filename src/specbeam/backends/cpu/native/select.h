// Selection requests about rows of logits. backends/cpu/choosing.py fills these structures, and library.py mirrors
// them.
#pragma once

#include <cstdint>

namespace specbeam {

enum EditKind : int64_t { ADD, REPEAT, BAN, SET, RAISE };

// A change of single scores. Its entries are [begin, end) of Choice::edit_rows and Choice::edit_tokens, and their
// values begin at `values`.
struct Edit {
  int64_t kind, begin, end, values;
};

// A SelectionRequest of selection.py. The parts of all requests lie in the arrays of Choice. A place says where the
// request's part begins.
struct SelectionRequest {
  int64_t first_row, rows, vocab;  // of the logits
  int64_t top, top_place;          // tokens per row; the place in tokens, log_probs, scores and noise
  int64_t given, given_place;      // tokens per row; the place in Choice::given and given_log_probs
  int64_t row_place;               // in normalizers and totals
  int64_t edits_begin, edits_end, one_of_begin, one_of_end;
  int64_t together_begin, together_end;         // tokens; equal for none
  int64_t allowed_place, noise_place;           // -1: no mask, no noise. noise_place: in streams and positions
  int64_t normalize, renormalize, total;        // 0 or 1
  int64_t top_k;                                // 0 for none
  double temperature, top_p, min_p, typical_p;  // 1, 1, 0 and 0 for none
  uint64_t seed;
};

// All requests of a pass. The sizes are the lengths of the arrays.
struct Choice {
  int64_t logit_rows, logit_columns;
  int64_t request_count, edit_count, entry_count, value_count, one_of_count, given_count, allowed_bytes, noise_count;
  int64_t top_count, row_count;
  const float *logits;  // [logit_rows, logit_columns]
  const SelectionRequest *requests;
  const Edit *edits;
  const int32_t *edit_rows, *edit_tokens;  // [entry_count]; rows count from the request's first row
  const float *edit_values;                // [value_count]
  const int64_t *one_of, *given;
  const uint8_t *allowed;               // bits, the lowest bit of a byte first; each row begins with a new byte
  const uint32_t *streams, *positions;  // [noise_count]
  int64_t *tokens;                      // [top_count], as log_probs, scores and noise
  float *log_probs, *scores;
  double *noise;
  float *given_log_probs;       // [given_count]
  float *normalizers, *totals;  // [row_count]
};

}  // namespace specbeam
