// The ways to compute an operator on split tensors, among which parallel/dispatch.h chooses: the rules, by subject;
// joining the full tensors, which works for every operator; and the proof of a rule on the program's own tensors.
//
// Each add_..._rules() adds the rules of one subject to the table. A rule returns in its Outcome whether it knew the
// call; others get what it does not know.
#pragma once

#include <functional>

#include "parallel/rules/call.h"

namespace ds::parallel {

// Computes an operator element by element, with broadcasting, also in place. It serves all operators with LibTorch's
// tag `pointwise`.
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

// Gathers the full tensors, computes the operator on them on every rank, and counts the join. A split tensor that the
// operator changes in place gets its part of the change. A result that is a view of a joined tensor is a split tensor
// without a cut, which refuses changes. Throws UsageError for operators that change a split tensor's sizes or memory in
// place.
void join_operands(Call& call);
// Computes an operator whose split operands have no cut. Where all of them are summed tensors (full values, partial
// sums of the gradient) the results are summed too. Beside other operands that have a gradient, they get one T-th of
// theirs, for T ranks of the axis.
void run_uncut(Call& call);

// Whether the operator, a copy of a split tensor to another device or dtype, is made for its values to be read: to the
// CPU from elsewhere, or to(at::kCPU, at::kDouble), which LibTorch's printing asks for.
bool is_copy_to_be_read(const Call& call);
// Computes a copy of a split tensor on the full one: a plain tensor, with its history. Collective.
void run_on_whole(Call& call);
// Throws UsageError, naming the parameter, for operators that give a split parameter other memory: set_data(), which
// model->to() and torch::nn::utils::vector_to_parameters() are made of, and set_(), of which torch::load() is.
void require_no_new_memory(const Call& call);

// Computes an operator with partial sums among its operands. An operator that is linear in them gives a partial sum;
// for other operators the sums are completed first.
void run_on_addends(Call& call);

// Calls `change` for every split tensor among the arguments, also in lists, and puts what it returns in its place.
void replace_split_arguments(const Call& call, const std::function<at::Tensor(const at::Tensor&)>& change);

// Proves a rule on the program's own tensors: computes the call at hand twice on copies of its arguments, by the rule
// and on the wholes, and compares the results and, where there are gradients, those of all operands for one gradient of
// the results. Leaves the call as it is. A gradient that does not arrive counts as zeros; NaN and infinite values must
// be in the same places. Operators that draw random numbers or leave memory as it is, and calls that the rule leaves to
// others, are not compared. Collective; all ranks come to the same conclusion. Throws InternalError naming the
// operator.
void verify_rule(const Rule& rule, const Call& call);
// Whether this thread is in verify_rule: what it calls is not verified again.
bool is_verifying();

}  // namespace ds::parallel
