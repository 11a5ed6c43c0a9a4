"""leanformer: how should a transformer's budget be spent on heads, head rank, depth and MLP?"""
