// Holds the precompiled header, see torch.h.
