"""Heddle beside its peers on this machine, in one run: speed, latency, memory, energy.

    make bench [ARGS="--quick"]        make peers  (llama.cpp and vLLM, in environments of their own)

**Workload.** Every stream sends one request of so many random prompt tokens and takes so many new ones, greedily,
past any end token; all requests of a round begin together, and no prompt is ever used twice. A cell is one size of
request, one number of streams and one number of adapters (random ones, of ranks 4 to 16 on all seven projections),
which the streams use in turn; more adapters than streams cannot be in use at once, so there is no such cell. Before a
cell's first round a short one is run that does not count: in it code is compiled and adapters are loaded. Then rounds
are run until they took `--seconds` together, one at least. Speeds are medians of the rounds, latencies are of all
rounds' requests.

**Peers.** Each runs in a process of its own with every core this one may use, one after another, and each has what it
needs to say which sequences got a token in a step: `peers/` says how for each. No peer tokenises, detokenises or
speaks HTTP here. Ratios are of figures of the same run; figures of two machines, or two hours, do not compare.

**Columns.** `whole`: new tokens a second from the first request's start to the last one's end, prefill included.
`decode`: the same while every stream is past its first token and none has ended. `first`: time to a request's first
token. `between`: between two tokens of a request. `memory`: the most that the serving process has held, as the system
counts it (VmHWM), loading included. `GOP/s`: two operations for each weight of the layers and each token fed, and for
each weight of the head and each token that came of it (no attention, no adapters), over the time of whole requests;
beside it the share of what a large float32 product reaches on this machine, measured at the start of the same run.
"""
