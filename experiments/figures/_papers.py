"""The papers whose figures are here: the first part of a file's name, and how it is cited."""

from __future__ import annotations

PAPERS = {
    "yoon2022": """\
@misc{yoon2022empirical,
  title = {Empirical Analysis on Top-k Gradient Sparsification for Distributed Deep Learning
           in a Supercomputing Environment},
  author = {Yoon, Daegun and Oh, Sangyoon},
  year = {2022},
  eprint = {2209.08497},
  archiveprefix = {arXiv}
}
""",
    "eghlidi2020": """\
@misc{eghlidi2020sparse,
  title = {Sparse Communication for Training Deep Networks},
  author = {Foroutan Eghlidi, Negar and Jaggi, Martin},
  year = {2020}
}
""",
    "shi2019": """\
@misc{shi2019understanding,
  title = {Understanding Top-k Sparsification in Distributed Deep Learning},
  author = {Shi, Shaohuai and Chu, Xiaowen and Cheung, Ka Chun and See, Simon},
  year = {2019},
  eprint = {1911.08772},
  archiveprefix = {arXiv}
}
""",
    "zhang": """\
@misc{zhang_stable_topk,
  title = {Stable {Top-K}: Exploiting Temporal Stability of {Top-K} Gradients},
  author = {Zhang, Zhao},
  howpublished = {Slides, Texas Advanced Computing Center, ICICLE}
}
""",
    "survey": "",  # of this project alone
}
