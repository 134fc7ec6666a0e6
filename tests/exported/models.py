"""The models of tests/exported/data: small ones of the kinds that people export.

make(name) gives a model, its example inputs by name, the dynamic dimensions of these, and how it is trained.
"""
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

BATCH = 8  # of a step; the examples of the export have half of it


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 24), nn.GELU())
        self.out = nn.Linear(24, 4)

    def forward(self, x):
        return self.out(self.body(x))


class Attention(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (u.view(b, t, self.heads, c // self.heads).transpose(1, 2) for u in self.qkv(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, dropout)
        self.fc, self.proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.drop(self.proj(F.gelu(self.fc(self.ln2(x)), approximate="tanh")))


class Gpt(nn.Module):
    def __init__(self, vocabulary=32, width=16, layers=2, context=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, 2, 0.1) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight  # tied
        for weight in (self.wte.weight, self.wpe.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True, dropout=0.1, bidirectional=True)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0])


class Residual(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Identity()
        if before != after:
            self.down = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + self.down(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2))
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        return self.fc(F.adaptive_avg_pool2d(self.layers(self.stem(x)), 1).flatten(1))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


class Vit(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.positions
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.mlp(x)
        return self.head(x[:, 0])


class UNet(nn.Module):
    def __init__(self):
        super().__init__()

        def convolution(before, after):
            return nn.Sequential(nn.Conv2d(before, after, 3, 1, 1), nn.GroupNorm(2, after), nn.SiLU())

        self.down1, self.down2 = convolution(1, 4), convolution(4, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.merge, self.out = convolution(8, 4), nn.Conv2d(4, 1, 1)

    def forward(self, x):
        top = self.down1(x)
        bottom = self.down2(F.max_pool2d(top, 2))
        return self.out(self.merge(torch.cat([top, self.up(bottom)], 1)))


class GruAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(6, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        y, last = self.gru(x)
        mixed, weights = self.attention(last.transpose(0, 1), y, y)
        return {"value": self.head(mixed.squeeze(1)), "weights": weights}


class GraphNet(nn.Module):
    """Two rounds of messages along the edges, which are added up at their targets."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(3, 8), nn.Linear(8, 1)
        self.message, self.update = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x, source, target):
        nodes = torch.relu(self.encode(x))
        for _ in range(2):
            messages = torch.relu(self.message(torch.cat([nodes[:, source], nodes[:, target]], -1)))
            sums = torch.zeros_like(nodes).index_add(1, target, messages)
            nodes = nodes + torch.relu(self.update(torch.cat([nodes, sums], -1)))
        return self.decode(nodes)


class Field(nn.Module):
    """u(x, t) of a physics-informed loss, which takes its second derivatives."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, points):
        return self.net(points)


def hf_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0,
                                      eos_token_id=0, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def hf_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
                                        use_cache=False, bos_token_id=0, eos_token_id=0, pad_token_id=0))


# name: class, inputs (name: sizes of one sample, or of all where it is shared; values below this number, 0: floats),
# loss, sizes of one sample's target or number of classes, optimizer and its rate.
TOKENS = ([8], 32)
MODELS = {
    "mlp": (Mlp, {"x": ([12], 0)}, "mse", [4], "AdamW", 1e-3),
    "gpt": (Gpt, {"tokens": TOKENS}, "next_token", None, "AdamW", 1e-3),
    "lstm": (Lstm, {"tokens": TOKENS}, "next_token", None, "AdamW", 1e-3),
    "resnet": (ResNet, {"x": ([3, 8, 8], 0)}, "cross_entropy", 10, "SGD", 1e-2),
    "encoder": (Encoder, {"x": ([5, 16], 0)}, "mse", [3], "AdamW", 1e-3),
    "vit": (Vit, {"x": ([3, 16, 16], 0)}, "cross_entropy", 10, "AdamW", 1e-3),
    "unet": (UNet, {"x": ([1, 8, 8], 0)}, "mse", [1, 8, 8], "SGD", 1e-2),
    "gru_attention": (GruAttention, {"x": ([5, 6], 0)}, "mse", [2], "AdamW", 1e-3),
    "graph": (GraphNet, {"x": ([6, 3], 0), "source": ([10], 6), "target": ([10], 6)}, "mse", [6, 1], "AdamW", 1e-3),
    "pinn": (Field, {"points": ([2], 0)}, "heat", None, "AdamW", 1e-3),
    "hf_gpt2": (hf_gpt2, {"input_ids": TOKENS, "labels": TOKENS}, "output", None, "AdamW", 1e-3),
    "hf_llama": (hf_llama, {"input_ids": TOKENS, "labels": TOKENS}, "output", None, "AdamW", 1e-3),
}
SHARED = ("source", "target")  # inputs without a batch dimension


def numbers(shape, step, which, below):
    """A tensor by a formula that C++ repeats exactly: whole numbers below `below`, or floats in (-1, 1) where it is 0."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    u = (7 * i * i + (37 + 10 * which) * i + 101 * step + 17 * which) % 251
    values = u % below if below else (u - 125).to(torch.float32) / 128
    return values.reshape(shape)


def inputs_of(name, step, batch=BATCH):
    """The inputs of a step by name; labels are tensors of their own with the values of input_ids."""
    inputs = {}
    for which, (key, (sizes, below)) in enumerate(MODELS[name][1].items()):
        if key in SHARED:
            inputs[key] = numbers(sizes, 0, which, below)
        else:
            inputs[key] = numbers([batch, *sizes], step, 0 if key == "labels" else which, below)
    return inputs


def dimensions_of(name):
    batch = Dim("batch", min=2, max=1024)
    if name == "hf_llama":  # its grouped attention guards the length: AUTO finds what holds
        return {key: {0: Dim.AUTO, 1: Dim.AUTO} for key in MODELS[name][1]}
    if name == "gpt":
        return {"tokens": {0: batch, 1: Dim("length", min=2, max=16)}}
    return {key: (None if key in SHARED else {0: batch}) for key in MODELS[name][1]}


def make(name):
    torch.manual_seed(0)
    return MODELS[name][0]().train()


def first_of(output):
    if isinstance(output, torch.Tensor):
        return output
    return output["value"] if "value" in output else output["logits"]


def loss_of(name, model, step):
    """The loss of a step on the whole batch."""
    kind, wanted = MODELS[name][2], MODELS[name][3]
    inputs = inputs_of(name, step)
    if kind == "output":
        return model(**inputs)["loss"]
    if kind == "heat":  # u_t = u_xx / 10, and u is 0 on average
        points = inputs["points"].requires_grad_()
        u = model(points)
        slopes, = torch.autograd.grad(u.sum(), points, create_graph=True)
        bends, = torch.autograd.grad(slopes[:, 0].sum(), points, create_graph=True)
        return (slopes[:, 1] - 0.1 * bends[:, 0]).square().mean() + u.square().mean()
    output = first_of(model(**inputs))
    if kind == "next_token":
        return F.cross_entropy(output.reshape(-1, output.shape[-1]), inputs["tokens"].roll(-1, 1).reshape(-1))
    if kind == "cross_entropy":
        return F.cross_entropy(output, numbers([BATCH], step, 5, wanted))
    return F.mse_loss(output, numbers([BATCH, *wanted], step, 5, 0))
