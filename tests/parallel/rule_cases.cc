#include "tests/parallel/rule_cases.h"

#include "dsengine/ops.h"

namespace ds::parallel {
namespace {

using Tensors = std::vector<at::Tensor>;

// Of one tensor of [4, 6, 8].
RuleCase of_one(const std::string& name, const std::function<at::Tensor(const at::Tensor&)>& run) {
  return {
      .name = name, .inputs = {{.sizes = {4, 6, 8}}}, .run = [run](const Tensors& t) { return Tensors{run(t[0])}; }};
}

RuleCase of_sizes(const std::string& name, const std::vector<std::vector<int64_t>>& sizes,
                  const std::function<at::Tensor(const Tensors&)>& run) {
  RuleCase result{.name = name, .inputs = {}, .run = [run](const Tensors& t) { return Tensors{run(t)}; }};
  for (const auto& size : sizes) result.inputs.push_back({.sizes = size});
  return result;
}

void add_pointwise(std::vector<RuleCase>& cases) {
  cases.push_back(of_one("gelu", [](const at::Tensor& x) { return at::gelu(x); }));
  cases.push_back(of_one("neg, abs, tanh", [](const at::Tensor& x) { return x.neg().abs().tanh(); }));
  cases.push_back(of_one("scalars", [](const at::Tensor& x) { return (x * 2 + 1) / 3 - 0.5; }));
  cases.push_back(of_one("clone, contiguous, to", [](const at::Tensor& x) {
    return x.clone().contiguous().to(at::kFloat).to(x.scalar_type()) + x.detach();
  }));
  cases.back().by_float = true;
  cases.push_back(of_one("like another", [](const at::Tensor& x) {
    return x * at::ones_like(x) + at::zeros_like(x) + at::full_like(x, 2) * x.new_ones({8});
  }));
  cases.push_back(of_one("in place", [](const at::Tensor& x) { return (x * 1).mul_(x).add_(1).sub_(x).relu_(); }));
  cases.push_back(of_one("in place through views", [](const at::Tensor& x) {
    const at::Tensor y = x * 1;
    y.transpose(0, 1).narrow(2, 0, 8).mul_(x.transpose(0, 1));
    y.view({4, 6, 8}).add_(1);
    return y;
  }));
  cases.push_back(of_one("fills", [](const at::Tensor& x) { return at::empty_like(x).zero_().fill_(2).copy_(x) + x; }));
  cases.push_back(of_sizes("add", {{4, 6, 8}, {4, 6, 8}}, [](const Tensors& t) { return t[0] + t[1]; }));
  cases.push_back(of_sizes("mul, broadcast", {{4, 6, 8}, {6, 1}}, [](const Tensors& t) { return t[0] * t[1]; }));
  cases.push_back(of_sizes("outer", {{4, 1, 8}, {6, 1}}, [](const Tensors& t) { return t[0] - t[1]; }));
  cases.push_back(of_sizes("three", {{4, 6, 8}, {6, 8}, {8}}, [](const Tensors& t) {
    return at::addcmul(t[0], t[1], t[2]) + at::where(t[0] > t[1], t[0], t[2]) + at::lerp(t[0], t[1], t[2]);
  }));
  cases.push_back(
      of_sizes("masked_fill", {{4, 6, 8}, {6, 8}}, [](const Tensors& t) { return t[0].masked_fill(t[1] > 0, -2.0); }));
  cases.push_back(of_sizes("in place, broadcast", {{4, 6, 8}, {6, 1}},
                           [](const Tensors& t) { return (t[0] * 1).add_(t[1]).mul_(t[1]); }));
}

void add_reshapes(std::vector<RuleCase>& cases) {
  cases.push_back(of_one("view heads", [](const at::Tensor& x) { return x.view({4, 6, 4, 2}).transpose(1, 2); }));
  cases.push_back(of_one("view rows", [](const at::Tensor& x) { return x.view({24, 8}); }));
  cases.push_back(of_one("view -1", [](const at::Tensor& x) { return x.view({-1}).view({2, 2, -1, 4}); }));
  cases.push_back(of_one("reshape of a transpose", [](const at::Tensor& x) {
    return x.transpose(0, 1).reshape({6, 32}).reshape({2, 3, 4, 8});
  }));
  cases.push_back(of_one("flatten, unflatten", [](const at::Tensor& x) {
    return x.flatten(0, 1).unflatten(1, {2, 4}).flatten(1, 2);
  }));
  cases.push_back(of_one("squeezes", [](const at::Tensor& x) {
    return x.unsqueeze(0).unsqueeze(-1).squeeze(0).unsqueeze(2).squeeze().unsqueeze(1).squeeze(at::IntArrayRef{1, 2});
  }));
  cases.push_back(of_one("permute", [](const at::Tensor& x) { return x.permute({2, 0, 1}).movedim(0, 1); }));
  cases.push_back(of_one("matrix transposes", [](const at::Tensor& x) { return x.mT() + x.transpose(-1, -2); }));
  cases.push_back(of_one("t", [](const at::Tensor& x) { return x.flatten(0, 1).t(); }));
  cases.push_back(of_sizes("expand", {{4, 1, 8}}, [](const Tensors& t) {
    return t[0].expand({4, 6, 8}) + t[0].expand({2, 4, -1, 8}).sum(0);
  }));
  cases.push_back(of_one("repeat", [](const at::Tensor& x) { return x.repeat({1, 2, 1}) * x.repeat({1, 2, 1}); }));
  cases.push_back(of_one("repeat in front", [](const at::Tensor& x) { return x.repeat({2, 1, 1, 1}); }));
  cases.push_back(of_one("repeat_interleave", [](const at::Tensor& x) { return x.repeat_interleave(2, 1); }));
  cases.push_back(of_one("tril, triu", [](const at::Tensor& x) { return x.tril(1) + x.triu(-1); }));
}

void add_pieces(std::vector<RuleCase>& cases) {
  for (const int64_t dim : {0, 1, 2}) {
    const std::string of = ", dimension " + std::to_string(dim);
    cases.push_back({.name = "chunk" + of, .inputs = {{.sizes = {4, 6, 8}}}, .run = [dim](const Tensors& t) {
                       return t[0].chunk(2, dim);
                     }});
    cases.push_back({.name = "split_with_sizes" + of, .inputs = {{.sizes = {8, 8, 8}}}, .run = [dim](const Tensors& t) {
                       return t[0].split_with_sizes({4, 2, 2}, dim);
                     }});
    cases.push_back({.name = "split" + of, .inputs = {{.sizes = {4, 6, 8}}}, .run = [dim](const Tensors& t) {
                       return t[0].split(3, dim);
                     }});
    cases.push_back({.name = "unbind" + of, .inputs = {{.sizes = {4, 6, 8}}}, .run = [dim](const Tensors& t) {
                       return t[0].unbind(dim);
                     }});
    cases.push_back(of_one("narrow, slice, select" + of, [dim](const at::Tensor& x) {
      return x.narrow(dim, 1, 2).sum() * x.slice(dim, -2).sum() + x.select(dim, -1).sum() + x.slice(dim, 0, 9, 2).sum();
    }));
    cases.push_back(of_one("whole slice" + of, [dim](const at::Tensor& x) { return x.slice(dim, 0, x.size(dim)); }));
    cases.push_back(of_sizes("cat" + of, {{4, 4, 4}, {4, 4, 4}}, [dim](const Tensors& t) {
      return at::cat({t[0], t[1], t[0]}, dim);
    }));
    cases.push_back(of_sizes("stack" + of, {{4, 4, 4}, {4, 4, 4}}, [dim](const Tensors& t) {
      return at::stack({t[0], t[1]}, dim);
    }));
  }
  cases.push_back(of_one("no rule", [](const at::Tensor& x) { return x.flip({0, 2}) + x.roll(1, 1) + x.cumsum(1); }));
}

void add_products(std::vector<RuleCase>& cases) {
  cases.push_back(of_sizes("linear", {{4, 6, 8}, {10, 8}}, [](const Tensors& t) { return at::linear(t[0], t[1]); }));
  cases.push_back(of_sizes("linear, bias", {{4, 6, 8}, {10, 8}, {10}},
                           [](const Tensors& t) { return at::linear(t[0], t[1], t[2]); }));
  cases.push_back(
      of_sizes("linear of one row", {{8}, {10, 8}}, [](const Tensors& t) { return at::linear(t[0], t[1]); }));
  cases.push_back(of_sizes("mm", {{4, 6}, {6, 8}}, [](const Tensors& t) { return at::mm(t[0], t[1]); }));
  cases.push_back(of_sizes("matmul", {{4, 6, 8}, {8, 10}}, [](const Tensors& t) { return at::matmul(t[0], t[1]); }));
  cases.push_back(
      of_sizes("matmul of batches", {{4, 6, 8}, {4, 8, 6}}, [](const Tensors& t) { return at::matmul(t[0], t[1]); }));
  cases.push_back(of_sizes("matmul, broadcast", {{4, 6, 8}, {2, 1, 8, 4}},
                           [](const Tensors& t) { return at::matmul(t[0], t[1]); }));
  cases.push_back(
      of_sizes("matrix times vector", {{4, 6}, {6}}, [](const Tensors& t) { return at::matmul(t[0], t[1]); }));
  cases.push_back(of_sizes("bmm", {{4, 6, 8}, {4, 8, 6}}, [](const Tensors& t) { return at::bmm(t[0], t[1]); }));
  cases.push_back(of_sizes("addmm", {{8}, {4, 6}, {6, 8}}, [](const Tensors& t) {
    return at::addmm(t[0], t[1], t[2]) + at::addmm(t[0], t[1], t[2], 2, 0.5);
  }));
  cases.push_back(of_sizes("baddbmm", {{4, 1, 6}, {4, 6, 8}, {4, 8, 6}},
                           [](const Tensors& t) { return at::baddbmm(t[0], t[1], t[2], 0.5, 2); }));
  cases.push_back(of_sizes("einsum", {{4, 6, 8}, {4, 8, 6}}, [](const Tensors& t) {
    return at::einsum("bik,bkj->bj", {t[0], t[1]});
  }));
}

void add_lookups(std::vector<RuleCase>& cases) {
  cases.push_back({.name = "embedding",
                   .inputs = {{.sizes = {10, 4}}, {.sizes = {4, 6}, .indices = 10}},
                   .run = [](const Tensors& t) { return Tensors{at::embedding(t[0], t[1])}; }});
  cases.push_back({.name = "embedding with padding",
                   .inputs = {{.sizes = {10, 4}}, {.sizes = {4, 6}, .indices = 10}},
                   .run = [](const Tensors& t) {
                     return Tensors{at::embedding(t[0], t[1], 3), at::embedding(t[0], t[1], 8),
                                    at::embedding(t[0], t[1], -1, /*scale_grad_by_freq=*/true)};
                   }});
  cases.push_back({.name = "index_select, gather",
                   .inputs = {{.sizes = {4, 6, 8}}, {.sizes = {3}, .indices = 6}, {.sizes = {4, 2, 8}, .indices = 6}},
                   .run = [](const Tensors& t) {
                     return Tensors{at::index_select(t[0], 1, t[1]), at::gather(t[0], 1, t[2]), t[0].index({t[1] % 4})};
                   }});
  cases.push_back({.name = "gather of classes",
                   .inputs = {{.sizes = {6, 8}}, {.sizes = {6, 1}, .indices = 8}},
                   .run = [](const Tensors& t) { return Tensors{at::gather(t[0].log_softmax(1), 1, t[1])}; }});
}

void add_normalizations(std::vector<RuleCase>& cases) {
  cases.push_back(of_sizes("layer_norm", {{4, 6, 8}, {8}, {8}},
                           [](const Tensors& t) { return at::layer_norm(t[0], {8}, t[1], t[2]); }));
  cases.push_back(of_sizes("layer_norm of two dimensions", {{4, 6, 8}, {6, 8}}, [](const Tensors& t) {
    return at::layer_norm(t[0], {6, 8}, t[1]);
  }));
  cases.push_back(
      of_sizes("rms_norm", {{4, 6, 8}, {8}}, [](const Tensors& t) { return at::rms_norm(t[0], {8}, t[1], 1e-5); }));
  for (const int64_t dim : {0, 1, -1}) {
    cases.push_back(of_one("softmax " + std::to_string(dim), [dim](const at::Tensor& x) { return x.softmax(dim); }));
    cases.push_back(
        of_one("log_softmax " + std::to_string(dim), [dim](const at::Tensor& x) { return x.log_softmax(dim); }));
  }
}

void add_reductions(std::vector<RuleCase>& cases) {
  cases.push_back(of_one("sum, mean", [](const at::Tensor& x) { return x.sum() + x.mean(); }));
  for (const bool keep : {false, true}) {
    for (const std::vector<int64_t>& dims : {std::vector<int64_t>{0}, {1}, {-1}, {0, 2}}) {
      cases.push_back(of_one("sum and mean of dimensions",
                             [dims, keep](const at::Tensor& x) { return x.sum(dims, keep) + x.mean(dims, keep); }));
    }
    cases.push_back({.name = "other reductions", .inputs = {{.sizes = {4, 6, 8}}}, .run = [keep](const Tensors& t) {
                       const at::Tensor& x = t[0];
                       return Tensors{x.amax(1, keep),
                                      x.amin(-1, keep),
                                      x.logsumexp(1, keep),
                                      x.prod(2, keep),
                                      x.var(1, true, keep),
                                      x.std(at::IntArrayRef{1}, false, keep),
                                      std::get<0>(x.max(1, keep)),
                                      x.norm(2, 1, keep),
                                      at::linalg_vector_norm(x, 2, {0}, keep)};
                     }});
  }
  cases.push_back({.name = "places",
                   .inputs = {{.sizes = {4, 6, 8}}},
                   .run =
                       [](const Tensors& t) {
                         return Tensors{t[0].argmax(1).to(at::kFloat),        (t[0] > 0).any(1).to(at::kFloat),
                                        (t[0] > 0).all().to(at::kFloat),      (t[0] > 9).any().to(at::kFloat),
                                        t[0].argmin(-1, true).to(at::kFloat), (t[0] > 0).sum(1).to(at::kFloat)};
                       },
                   .ints_alone = true});
}

void add_attention(std::vector<RuleCase>& cases) {
  const std::vector<std::vector<int64_t>> sizes = {{2, 4, 6, 4}, {2, 4, 6, 4}, {2, 4, 6, 8}};
  cases.push_back(of_sizes("attention", sizes,
                           [](const Tensors& t) { return at::scaled_dot_product_attention(t[0], t[1], t[2]); }));
  cases.push_back(of_sizes("causal attention", sizes, [](const Tensors& t) {
    return at::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0.0, true, 0.3);
  }));
  cases.push_back(of_sizes("grouped heads", {{2, 4, 6, 4}, {2, 2, 6, 4}, {2, 2, 6, 4}}, [](const Tensors& t) {
    return at::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0.0, true, std::nullopt, /*enable_gqa=*/true);
  }));
  cases.push_back(of_sizes("attention with a mask", {{2, 4, 6, 4}, {2, 4, 6, 4}, {2, 4, 6, 4}, {4, 6, 6}},
                           [](const Tensors& t) { return at::scaled_dot_product_attention(t[0], t[1], t[2], t[3]); }));
  cases.push_back(of_sizes(
      "attention with a mask of booleans", {{2, 4, 6, 4}, {2, 4, 6, 4}, {2, 4, 6, 4}, {4, 6, 6}},
      [](const Tensors& t) { return at::scaled_dot_product_attention(t[0], t[1], t[2], t[3].detach() > -0.7); }));
  cases.push_back(of_sizes("attention of one key and value for all batches", {{2, 4, 6, 4}, {1, 4, 6, 4}, {1, 4, 6, 4}},
                           [](const Tensors& t) { return at::scaled_dot_product_attention(t[0], t[1], t[2]); }));
  cases.push_back(of_sizes("attention of one query for all batches", {{1, 4, 6, 4}, {2, 4, 6, 4}, {2, 4, 6, 4}},
                           [](const Tensors& t) { return at::scaled_dot_product_attention(t[0], t[1], t[2]); }));
  for (RuleCase* broadcasting : {&cases.end()[-2], &cases.back()}) broadcasting->left_to_joins = true;
}

void add_losses(std::vector<RuleCase>& cases) {
  for (const int64_t reduction : {0, 1, 2}) {
    for (const double smoothing : {0.0, 0.1}) {
      cases.push_back({.name = "cross entropy",
                       .inputs = {{.sizes = {6, 8}}, {.sizes = {6}, .indices = 8}},
                       .run = [=](const Tensors& t) {
                         return Tensors{at::cross_entropy_loss(t[0], t[1], {}, reduction, 3, smoothing)};
                       }});
    }
    cases.push_back({.name = "nll of log_softmax",
                     .inputs = {{.sizes = {6, 8}}, {.sizes = {6}, .indices = 8}},
                     .run = [=](const Tensors& t) {
                       return Tensors{at::nll_loss_nd(t[0].log_softmax(1), t[1], {}, reduction, 3)};
                     }});
    cases.push_back(
        of_sizes("mse", {{6, 8}, {6, 8}}, [=](const Tensors& t) { return at::mse_loss(t[0], t[1], reduction); }));
  }
  for (const auto reduction : {ops::LossReduction::kMean, ops::LossReduction::kSum}) {
    cases.push_back(
        {.name = "linear_cross_entropy",
         .inputs = {{.sizes = {2, 3, 4}}, {.sizes = {8, 4}}, {.sizes = {8}}, {.sizes = {2, 3}, .indices = 8}},
         .run = [=](const Tensors& t) {
           return Tensors{ops::linear_cross_entropy(t[0], t[1], {}, t[3], {.reduction = reduction}),
                          ops::linear_cross_entropy(t[0], t[1], t[2], t[3],
                                                    {.reduction = reduction,
                                                     .ignore_index = 3,
                                                     .label_smoothing = 0.1,
                                                     .logit_scale = 0.7,
                                                     .logit_softcap = 2.0})};
         }});
  }
  cases.push_back(
      {.name = "cross entropy with weights, and of images",
       .inputs = {{.sizes = {6, 8}},
                  {.sizes = {6}, .indices = 8},
                  {.sizes = {8}, .positive = true},
                  {.sizes = {2, 8, 3}},
                  {.sizes = {2, 3}, .indices = 8}},
       .run = [](const Tensors& t) {
         return Tensors{at::cross_entropy_loss(t[0], t[1], t[2].detach()), at::cross_entropy_loss(t[3], t[4])};
       }});
}

}  // namespace

std::vector<RuleCase> shape_cases() {
  std::vector<RuleCase> cases;
  add_pointwise(cases);
  add_reshapes(cases);
  add_pieces(cases);
  return cases;
}

std::vector<RuleCase> compute_cases() {
  std::vector<RuleCase> cases;
  add_products(cases);
  add_lookups(cases);
  add_normalizations(cases);
  add_reductions(cases);
  add_attention(cases);
  add_losses(cases);
  return cases;
}

}  // namespace ds::parallel
