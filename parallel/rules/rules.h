// Rules by subject. Each function adds its own to a table; what a rule does not know it leaves to others (Outcome).
#pragma once

#include "parallel/rules/call.h"

namespace ds::parallel {

// Element by element, with broadcasting; also in place. For all operators with the tag `pointwise`.
Outcome compute_pointwise(Call& call);

void add_pointwise_rules(RuleTable& table);      // copies, casts, fills, tensors like another
void add_shape_rules(RuleTable& table);          // reshape, permute, expand, squeeze
void add_piece_rules(RuleTable& table);          // narrow, split, select, cat, stack
void add_product_rules(RuleTable& table);        // linear, matmul, mm, addmm, bmm
void add_lookup_rules(RuleTable& table);         // embedding, gather, index_select
void add_normalization_rules(RuleTable& table);  // layer_norm, rms_norm, softmax, log_softmax
void add_reduction_rules(RuleTable& table);      // sum, mean, and others along dimensions that are not cut
void add_attention_rules(RuleTable& table);      // scaled_dot_product_attention
void add_loss_rules(RuleTable& table);           // cross_entropy_loss, nll_loss, mse_loss
void add_random_rules(RuleTable& table);         // dropout

}  // namespace ds::parallel
