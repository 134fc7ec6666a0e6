// Programs with a method of training of their own: contrastive and graph learning, second-order meta-learning, sparse
// tables, a normalizing flow, conflicting tasks, and cross-validation.
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/porting/trainer.h"

namespace ds::engine {
namespace {

namespace nn = torch::nn;

// --- CLIP: two towers, the embeddings of all ranks gathered with their gradient -------------------------------------

struct GatherRows : torch::autograd::Function<GatherRows> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& rows,
                            comm::Communicator* ranks) {
    context->saved_data["ranks"] = reinterpret_cast<int64_t>(ranks);
    at::Tensor all = torch::empty({rows.size(0) * ranks->size(), rows.size(1)}, rows.options());
    ranks->all_gather(all, rows.contiguous(), "embeddings").wait();
    return all;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    auto* const ranks = reinterpret_cast<comm::Communicator*>(context->saved_data["ranks"].toInt());
    const at::Tensor& all = gradients[0];
    at::Tensor rows = torch::empty({all.size(0) / ranks->size(), all.size(1)}, all.options());
    ranks->reduce_scatter(rows, all.contiguous(), comm::ReduceOp::kSum, "gradients of embeddings").wait();
    return {rows, at::Tensor()};
  }
};

struct ClipImpl : nn::Module {
  ClipImpl() {
    image = register_module("image", nn::Sequential(nn::Linear(12, 24), nn::GELU(), nn::Linear(24, 8)));
    text = register_module("text", nn::Sequential(nn::Embedding(30, 6), nn::Flatten(), nn::Linear(18, 8)));
    draw_weights(*this, 201);
    scale = register_parameter("scale", torch::tensor(2.0F));
  }
  nn::Sequential image, text;
  at::Tensor scale;
};
TORCH_MODULE(Clip);

Losses train_clip(const Trainer& trainer) {
  Clip net;
  const auto model = trainer.train(net.ptr(), {.lr = 3e-3, .clip_norm = 1.0});
  const at::Tensor labels = trainer.part(torch::arange(kGlobalBatch));
  const auto gathered = [&](const at::Tensor& rows) {
    return trainer.ranks() == nullptr ? rows : GatherRows::apply(rows, trainer.ranks());
  };
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const at::Tensor z = normal({kGlobalBatch, 3}, 20200 + static_cast<uint64_t>(step));
    const at::Tensor pixels = trainer.part(z.matmul(normal({3, 12}, 203)));
    const at::Tensor words = trainer.part(((z * 5).round() + 15).clamp(0, 29).to(torch::kLong));
    const at::Tensor images = nn::functional::normalize(net->image->forward(pixels));
    const at::Tensor texts = nn::functional::normalize(net->text->forward(words));
    const at::Tensor of_images = net->scale.exp() * images.matmul(gathered(texts).t());
    const at::Tensor of_texts = net->scale.exp() * texts.matmul(gathered(images).t());
    const at::Tensor loss =
        (torch::cross_entropy_loss(of_images, labels) + torch::cross_entropy_loss(of_texts, labels)) / 2;
    model->backward(loss);
    model->step();
    losses.push_back(loss.item<double>());
    const torch::NoGradGuard no_grad;
    net->scale.clamp_(0, 2.005);  // is reached
  }
  losses.push_back(sum_of_weights(*net));
  return losses;
}

// --- a graph network: graphs of other sizes on each rank, of which one has no label at all --------------------------

struct GraphNetImpl : nn::Module {
  GraphNetImpl() {
    in = register_module("in", nn::Linear(4, 12));
    message = register_module("message", nn::Linear(24, 12));
    out = register_module("out", nn::Linear(12, 3));
    draw_weights(*this, 211);
  }
  at::Tensor forward(const at::Tensor& nodes, const at::Tensor& from, const at::Tensor& to) {
    at::Tensor h = torch::relu(in(nodes));
    for (int round = 0; round < 2; ++round) {
      const at::Tensor sent = torch::relu(message(torch::cat({h.index_select(0, from), h.index_select(0, to)}, 1)));
      h = h + torch::zeros_like(h).index_add(0, to, sent) / 4;
    }
    return out(h);
  }
  nn::Linear in{nullptr}, message{nullptr}, out{nullptr};
};
TORCH_MODULE(GraphNet);

Losses train_graph_net(const Trainer& trainer) {
  GraphNet net;
  const auto model = trainer.train(net.ptr(), {.lr = 5e-3});
  const int64_t own = kGlobalBatch / trainer.world();
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    std::vector<at::Tensor> nodes, from, to, labels;
    int64_t before = 0;
    for (int64_t graph = trainer.rank() * own; graph < (trainer.rank() + 1) * own; ++graph) {
      const auto seed = static_cast<uint64_t>(21200 + 10 * (step * kGlobalBatch + graph));
      const int64_t size = 3 + integers(9, {1}, seed).item<int64_t>();
      nodes.push_back(normal({size, 4}, seed + 1));
      from.push_back(before + integers(size, {3 * size}, seed + 2));
      to.push_back(before + integers(size, {3 * size}, seed + 3));
      labels.push_back(nodes.back().slice(1, 0, 3).argmax(1));
      if (graph >= kGlobalBatch - 2) labels.back().fill_(-100);
      before += size;
    }
    const at::Tensor wanted = torch::cat(labels);
    const at::Tensor scores = net->forward(torch::cat(nodes), torch::cat(from), torch::cat(to));
    const at::Tensor sum = torch::cross_entropy_loss(scores, wanted, {}, at::Reduction::Sum, /*ignore_index=*/-100);
    const at::Tensor loss = trainer.per_item(sum, wanted.ne(-100).sum());
    model->backward(loss);
    model->step();
    losses.push_back(loss.item<double>());
  }
  losses.push_back(sum_of_weights(*net));
  return losses;
}

// --- MAML of second order: inner steps by autograd, a functional forward --------------------------------------------

Losses train_maml(const Trainer& trainer) {
  nn::Sequential net(nn::Linear(1, 16), nn::Tanh(), nn::Linear(16, 1));
  draw_weights(*net, 221);
  const auto model = trainer.train(net.ptr());
  const auto forward = [](const std::vector<at::Tensor>& p, const at::Tensor& x) {
    return torch::linear(torch::tanh(torch::linear(x, p[0], p[1])), p[2], p[3]);
  };
  const auto loss_of_task = [&](uint64_t task) {
    const double phase = 3 * uniform({1}, task).item<double>();
    const at::Tensor seen = 6 * uniform({5, 1}, task + 1) - 3, asked = 6 * uniform({5, 1}, task + 2) - 3;
    std::vector<at::Tensor> p = net->parameters();
    for (int inner = 0; inner < 2; ++inner) {
      const at::Tensor loss = torch::mse_loss(forward(p, seen), torch::sin(seen + phase));
      const auto slope = torch::autograd::grad({loss}, p, {}, /*retain_graph=*/true, /*create_graph=*/true);
      for (size_t i = 0; i < p.size(); ++i) p[i] = p[i] - 0.05 * slope[i];
    }
    return torch::mse_loss(forward(p, asked), torch::sin(asked + phase));
  };
  const int own = kGlobalBatch / trainer.world();
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    at::Tensor loss = torch::zeros({});
    for (int task = trainer.rank() * own; task < (trainer.rank() + 1) * own; ++task) {
      loss = loss + loss_of_task(static_cast<uint64_t>(22200 + 10 * (step * kGlobalBatch + task))) / own;
    }
    model->backward(loss);
    model->step();
    losses.push_back(loss.item<double>());
  }
  losses.push_back(sum_of_weights(*net));
  return losses;
}

// --- DLRM: sparse tables with Adagrad, dense layers with AdamW, one loss --------------------------------------------

constexpr int64_t kTables = 2;
constexpr int64_t kRows = 50;

struct TablesImpl : nn::Module {
  TablesImpl() {
    const auto options = nn::EmbeddingBagOptions(kRows, 4).sparse(true).mode(torch::kSum);
    for (int64_t i = 0; i < kTables; ++i) {
      bags.push_back(register_module("bag" + std::to_string(i), nn::EmbeddingBag(options)));
    }
    draw_weights(*this, 231);
  }
  std::vector<nn::EmbeddingBag> bags;
};
TORCH_MODULE(Tables);

Losses train_dlrm(const Trainer& trainer) {
  Tables tables;
  nn::Sequential dense(nn::Linear(4 * (kTables + 1), 12), nn::ReLU(), nn::Linear(12, 1));
  draw_weights(*dense, 232);
  const auto table_model = trainer.train(tables.ptr(), {.optimizer = std::make_shared<torch::optim::Adagrad>(
                                                            tables->parameters(), torch::optim::AdagradOptions(0.05))});
  const auto dense_model = trainer.train(dense.ptr());
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const auto seed = static_cast<uint64_t>(step);
    const at::Tensor rows = (uniform({kGlobalBatch, kTables, 3}, 23300 + seed).pow(3) * kRows).to(torch::kLong);
    const at::Tensor labels = trainer.part((rows.sum({1, 2}) % 2).to(torch::kFloat));
    const at::Tensor own = trainer.part(rows);
    std::vector<at::Tensor> features{trainer.part(normal({kGlobalBatch, 4}, 23400 + seed))};
    for (int64_t i = 0; i < kTables; ++i) features.push_back(tables->bags[i](own.select(1, i)));
    const at::Tensor scores = dense->forward(torch::cat(features, 1)).squeeze(1);
    const at::Tensor loss = torch::binary_cross_entropy_with_logits(scores, labels);
    trainer.backward(loss, {dense_model, table_model});
    dense_model->step();
    table_model->step();
    losses.push_back(loss.item<double>());
  }
  losses.push_back(sum_of_weights(*dense));
  table_model->with_whole_weights([&] { losses.back() += sum_of_weights(*tables); });
  return losses;
}

// --- a normalizing flow: ActNorm sets its parameters from the first batch, in forward -------------------------------

struct ActNormImpl : nn::Module {
  explicit ActNormImpl(const Trainer& job) : trainer(job) {
    log_scale = register_parameter("log_scale", torch::zeros({4}));
    shift = register_parameter("shift", torch::zeros({4}));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (!ready) {
      const torch::NoGradGuard no_grad;
      const at::Tensor mean = trainer.mean(x.mean(0).to(torch::kDouble));
      const at::Tensor square = trainer.mean(x.pow(2).mean(0).to(torch::kDouble));
      log_scale.copy_(-0.5 * (square - mean * mean).log());
      shift.copy_(-mean);
      ready = true;
    }
    return (x + shift) * log_scale.exp();
  }
  const Trainer& trainer;
  at::Tensor log_scale, shift;
  bool ready = false;
};
TORCH_MODULE(ActNorm);

struct FlowImpl : nn::Module {
  explicit FlowImpl(const Trainer& trainer) {
    for (int i = 0; i < 2; ++i) {
      couplings.push_back(register_module("coupling" + std::to_string(i),
                                          nn::Sequential(nn::Linear(2, 12), nn::Tanh(), nn::Linear(12, 4))));
    }
    draw_weights(*this, 241);
    for (int i = 0; i < 2; ++i) norms.push_back(register_module("norm" + std::to_string(i), ActNorm(trainer)));
  }
  at::Tensor loss(at::Tensor x) {
    at::Tensor volume = torch::zeros({x.size(0)});
    for (size_t i = 0; i < norms.size(); ++i) {
      x = norms[i](x);
      const std::vector<at::Tensor> half = x.chunk(2, 1), made = couplings[i]->forward(half[0]).chunk(2, 1);
      const at::Tensor stretch = torch::tanh(made[0]);
      x = torch::cat({half[1] * stretch.exp() + made[1], half[0]}, 1);
      volume = volume + norms[i]->log_scale.sum() + stretch.sum(1);
    }
    return (0.5 * x.pow(2).sum(1) - volume).mean();
  }
  std::vector<ActNorm> norms;
  std::vector<nn::Sequential> couplings;
};
TORCH_MODULE(Flow);

Losses train_flow(const Trainer& trainer) {
  Flow net(trainer);
  const auto model = trainer.train(net.ptr(), {.lr = 2e-3, .clip_norm = 1.0});
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const at::Tensor points = normal({2 * kGlobalBatch, 4}, 24200 + static_cast<uint64_t>(step));
    const at::Tensor loss = net->loss(trainer.part(2 * points.matmul(normal({4, 4}, 243)) + 1));
    model->backward(loss);
    model->step();
    losses.push_back(loss.item<double>());
  }
  losses.push_back(sum_of_weights(*net));
  return losses;
}

// --- conflicting tasks: gradients projected on one another (PCGrad), weights by uncertainty, a part frozen in turn --

struct TasksImpl : nn::Module {
  TasksImpl() {
    trunk = register_module("trunk", nn::Sequential(nn::Linear(4, 16), nn::Tanh()));
    heads = register_module("heads", nn::Linear(16, 2));
    draw_weights(*this, 261);
    uncertainty = register_parameter("uncertainty", torch::zeros({2}));
  }
  nn::Sequential trunk;
  nn::Linear heads{nullptr};
  at::Tensor uncertainty;
};
TORCH_MODULE(Tasks);

// The gradients of both tasks on the trunk, averaged over the global batch, and without what one takes from the other.
std::vector<at::Tensor> projected(const Trainer& trainer, const std::vector<at::Tensor>& losses,
                                  const std::vector<at::Tensor>& trunk) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& loss : losses) {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& gradient : torch::autograd::grad({loss}, trunk, {}, /*retain_graph=*/true)) {
      parts.push_back(gradient.flatten());
    }
    flat.push_back(trainer.mean(torch::cat(parts)));
  }
  const at::Tensor conflict = flat[0].dot(flat[1]).clamp_max(0);
  at::Tensor sum = flat[0] - conflict / flat[1].dot(flat[1]) * flat[1];
  sum = sum + flat[1] - conflict / flat[0].dot(flat[0]) * flat[0];
  std::vector<at::Tensor> result;
  int64_t begin = 0;
  for (const at::Tensor& parameter : trunk) {
    result.push_back(sum.slice(0, begin, begin + parameter.numel()).view(parameter.sizes()));
    begin += parameter.numel();
  }
  return result;
}

Losses train_tasks(const Trainer& trainer) {
  Tasks net;
  const auto sgd = std::make_shared<torch::optim::SGD>(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto model = trainer.train(net.ptr(), {.optimizer = sgd});
  const std::vector<at::Tensor> trunk = net->trunk->parameters();
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const at::Tensor x = trainer.part(normal({kGlobalBatch, 4}, 26200 + static_cast<uint64_t>(step)));
    const bool frozen = step % 3 == 2;
    for (const at::Tensor& parameter : trunk) parameter.set_requires_grad(!frozen);
    const at::Tensor features = net->trunk->forward(x);
    const at::Tensor found = net->heads(features);
    const at::Tensor wanted = torch::stack({x.sum(1), -x.sum(1) + x.select(1, 0).sin()}, 1);
    const at::Tensor errors = (found - wanted).pow(2).mean(0);
    const at::Tensor weighted = errors * (-net->uncertainty).exp() + net->uncertainty;
    at::Tensor loss = weighted.sum();
    if (!frozen) {
      const auto gradients = projected(trainer, {weighted[0], weighted[1]}, trunk);
      const at::Tensor apart = net->heads(features.detach());
      const at::Tensor of_heads = (apart - wanted).pow(2).mean(0) * (-net->uncertainty).exp() + net->uncertainty;
      loss = of_heads.sum();
      for (size_t i = 0; i < trunk.size(); ++i) loss = loss + (trunk[i] * gradients[i]).sum();
    }
    model->backward(loss);
    model->step();
    losses.insert(losses.end(), {errors[0].item<double>(), errors[1].item<double>()});
  }
  losses.push_back(sum_of_weights(*net));
  return losses;
}

// --- cross-validation of quantiles: an engine for each fold, one after the other, and a loss with its own gradient --

struct Pinball : torch::autograd::Function<Pinball> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& found,
                            const at::Tensor& wanted, const at::Tensor& quantiles) {
    const at::Tensor over = (found - wanted).gt(0).to(found.scalar_type());
    context->save_for_backward({over, quantiles});
    return ((over - quantiles) * (found - wanted)).mean();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor slope = (saved[0] - saved[1]) / saved[0].numel();
    return {gradients[0] * slope, at::Tensor(), at::Tensor()};
  }
};

Losses cross_validate(const Trainer& trainer) {
  constexpr int kFolds = 3;
  const at::Tensor quantiles = torch::tensor({0.1F, 0.5F, 0.9F});
  const auto fold_of = [&](int number) {
    const at::Tensor x = normal({kGlobalBatch, 2}, 27200 + static_cast<uint64_t>(number));
    return std::pair(trainer.part(x), trainer.part(x.sum(1, true) + x * normal({kGlobalBatch, 2}, 273)).sum(1, true));
  };
  Losses losses;
  for (int left_out = 0; left_out < kFolds; ++left_out) {
    nn::Sequential net(nn::Linear(2, 16), nn::Tanh(), nn::Linear(16, 3));
    draw_weights(*net, 271);
    const auto model = trainer.train(net.ptr(), {.lr = 1e-2, .clip_norm = 1.0});
    for (int step = 0; step < 6; ++step) {
      if (step % kFolds == left_out) continue;
      const auto [x, y] = fold_of(step % kFolds);
      const at::Tensor loss = Pinball::apply(net->forward(x), y, quantiles);
      model->backward(loss);
      model->step();
      losses.push_back(loss.item<double>());
    }
    const torch::NoGradGuard no_grad;
    const auto [x, y] = fold_of(left_out);
    losses.push_back(Pinball::apply(net->forward(x), y, quantiles).item<double>());
  }
  return losses;
}

}  // namespace

std::vector<Program> methods_programs() {
  return {written_once("Clip", train_clip),
          written_once("GraphNet", train_graph_net),
          written_once("Maml", train_maml),
          written_once("Dlrm", train_dlrm),
          written_once("Flow", train_flow),
          written_once("ConflictingTasks", train_tasks),
          written_once("CrossValidation", cross_validate)};
}

}  // namespace ds::engine
