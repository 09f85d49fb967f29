// The version of the functions and the layout of the structures, which library.py compares with its own when it loads a
// library.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ahead.h"
#include "model.h"
#include "select.h"

using namespace specbeam;

namespace {

struct Field {
  const char *name;
  int64_t offset;
};

#define SIZE(type) {#type, int64_t(sizeof(type))}
#define AT(type, field) {#type "." #field, int64_t(offsetof(type, field))}
// clang-format off
constexpr Field FIELDS[] = {
    SIZE(ModelConfig), AT(ModelConfig, vocab), AT(ModelConfig, hidden), AT(ModelConfig, inner),
    AT(ModelConfig, layers), AT(ModelConfig, heads), AT(ModelConfig, kv_heads), AT(ModelConfig, head_dim),
    AT(ModelConfig, context), AT(ModelConfig, bands), AT(ModelConfig, layer_norm), AT(ModelConfig, activation), AT(ModelConfig, gated),
    AT(ModelConfig, parallel), AT(ModelConfig, whole_cache), AT(ModelConfig, norm_eps),
    AT(ModelConfig, attention_scale), AT(ModelConfig, embedding_scale), AT(ModelConfig, attention_softcap),
    AT(ModelConfig, logits_softcap),
    SIZE(Segment), AT(Segment, nodes), AT(Segment, prefix_length), AT(Segment, suffix_columns),
    AT(Segment, source_length), AT(Segment, tokens),
    AT(Segment, positions), AT(Segment, slots), AT(Segment, prefix), AT(Segment, suffixes),
    AT(Segment, source), AT(Segment, watched), AT(Segment, rows), AT(Segment, shown), AT(Segment, heads),
    AT(Segment, scores),
    SIZE(Edit), AT(Edit, kind), AT(Edit, begin), AT(Edit, end), AT(Edit, values),
    SIZE(SelectionRequest), AT(SelectionRequest, first_row), AT(SelectionRequest, rows), AT(SelectionRequest, vocab),
    AT(SelectionRequest, top), AT(SelectionRequest, top_place), AT(SelectionRequest, given),
    AT(SelectionRequest, given_place), AT(SelectionRequest, row_place), AT(SelectionRequest, edits_begin),
    AT(SelectionRequest, edits_end), AT(SelectionRequest, one_of_begin), AT(SelectionRequest, one_of_end),
    AT(SelectionRequest, together_begin), AT(SelectionRequest, together_end),
    AT(SelectionRequest, allowed_place), AT(SelectionRequest, noise_place), AT(SelectionRequest, normalize),
    AT(SelectionRequest, renormalize), AT(SelectionRequest, total), AT(SelectionRequest, top_k),
    AT(SelectionRequest, temperature), AT(SelectionRequest, top_p), AT(SelectionRequest, min_p),
    AT(SelectionRequest, typical_p), AT(SelectionRequest, seed),
    SIZE(Choice), AT(Choice, logit_rows), AT(Choice, logit_columns), AT(Choice, request_count), AT(Choice, edit_count),
    AT(Choice, entry_count), AT(Choice, value_count), AT(Choice, one_of_count), AT(Choice, given_count),
    AT(Choice, allowed_bytes), AT(Choice, noise_count), AT(Choice, top_count), AT(Choice, row_count),
    AT(Choice, logits), AT(Choice, requests), AT(Choice, edits), AT(Choice, edit_rows), AT(Choice, edit_tokens),
    AT(Choice, edit_values), AT(Choice, one_of), AT(Choice, given), AT(Choice, allowed), AT(Choice, streams),
    AT(Choice, positions), AT(Choice, tokens), AT(Choice, log_probs), AT(Choice, scores), AT(Choice, noise),
    AT(Choice, given_log_probs), AT(Choice, normalizers), AT(Choice, totals),
    SIZE(Ahead), AT(Ahead, slots), AT(Ahead, scores), AT(Ahead, best_above), AT(Ahead, all_above),
};
// clang-format on

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int32_t specbeam_abi_version() { return ABI_VERSION; }

// The offset of a field, such as "SelectionRequest.top_k", or the size of a structure, such as "SelectionRequest". -1
// for another name.
int64_t specbeam_offset(const char *name) {
  for (const Field &field : FIELDS)
    if (!std::strcmp(name, field.name)) return field.offset;
  return -1;
}
}
#pragma GCC visibility pop
