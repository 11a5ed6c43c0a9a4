"""Figures on README and findings, from the values of the other modules."""

from study.figures import afterwards, conditioning, heads, language, papers, published, shapes, tasks
from study.figures.passages import FINDINGS, README, Passage


OPENLM = "| {low[HIGH]} to {high[HIGH]} | {heads[open_lm][HIGH]:+.3f} | {worse[HIGH]} of {pairs[HIGH]} |"
TRADE = "| {{short[change][{0}]:+.1f}} | {{long[change][{0}]:+.1f}} | {{wide[change][{0}]:+.1f}} |"
PASSAGES = [
    Passage(
        papers.counts,
        {
            FINDINGS: [
                "{saved[0]:.0f} to {saved[1]:.0f} % fewer parameters (Nyströmformer: at most {nystromformer:.0f} %)"
            ]
        },
    ),
    Passage(
        published.values,
        {
            README: ["archai's show no loss | {step[64 to 32]:+.3f} |"],
            FINDINGS: [
                "| open_lm | {low[16]} to {high[16]} | {heads[open_lm][16]:+.3f} | {worse[16]} of {pairs[16]} pairs |",
                *(OPENLM.replace("HIGH", str(high)) for high in (32, 48, 64, 128)),
                OPENLM.replace("HIGH", "96").replace(":+", ":"),
                *(f"| {{archai[{i}][0]}} to {{archai[{i}][1]}} | {{archai[{i}][2]:+.3f}} |" for i in range(3)),
                "without squares | {archai[0][0]} to {archai[0][1]} | {linear:+.3f} |",
            ],
        },
    ),
    Passage(
        published.reruns_and_updates,
        {
            FINDINGS: [
                "{fewest:,} to {most:,} in open_lm; in archai's Transformer-XL {lm1b:,} on One Billion Word and "
                "{wt103:,} on",
                "heads of 64 and below by {held[1]:+.3f nats} at equal depth",
                "reran one change {runs} times** ({studies} studies",
                "in {worse} of {runs}, by {mean:.4f bits per byte}, about {nats.value:.2f} nats",
            ],
        },
    ),
    Passage(language.bigram, {FINDINGS: ["near a bigram model's {bigram:.2f} on"]}),
    Passage(
        afterwards.values,
        {
            README: [
                "32 heads against one | {late[32][1]:+.0f} |",
                "32 heads minus 4 heads; equivalent within a margin set before, 0.03 | {planned:+.3f} |",
                "the gain in accuracy, ten interventions | {causes[correlation]:.2f} ({causes[low]:.2f} to "
                "{causes[high]:.2f}) |",
            ],
            FINDINGS: [
                "all are at {plateau[0]:.2f} to {plateau[1]:.2f} nats",
                "reaches 3.0 nats at step {arrive[1]:.0f}.",
                "| steps to a training loss of 3.0 nats | {late[32][1]:+.0f} | | steps to 2.6 nats | "
                "{late[32][2]:+.0f} |",
                "with the learning rate at its end | {short:+.3f} |",
                "32 heads minus 4 (p = {planned_p:.4f}) | {planned:+.3f} |",
                "held-out text and {ahead:.3f} ahead on the training text",
                "the error by {surface[0]:+.1f %} at 120,000 and {surface[1]:+.1f %} at 270,000 parameters; "
                "{gain} of {steps} direct steps",
                "added heads give {added_all:+.1f %}, pooled",
                "heads about {about:.0f} % of the error",
                "over seeds, {causes[one]:+.1f} over interventions.",
                "{better} gain, {worse} lose, {neither} does neither.",
            ],
        },
    ),
    Passage(
        heads.values,
        {
            README: ["(single runs): {single:.3f}."],
            FINDINGS: [
                "| held-out loss after 4,000 steps | {from_1_long:+.3f} |",
                "32 heads end {single:.3f} behind 4 heads",
                "heads of 32 instead of 64 are better at {better} width, and worse at one ({worse})",
            ],
        },
    ),
    Passage(
        shapes.trade,
        {
            README: ["from halving the layers alone | {long[change][layers halved]:+.1f %} |"],
            FINDINGS: [
                f"| no heads added {TRADE.format('layers halved')}",
                f"| a third more heads {TRADE.format('lean, MLP kept')}",
                "the planned margin of {margin:.0f} % in {good} of {arms} comparisons",
            ],
        },
    ),
    Passage(language.gpt2_pair, {FINDINGS: ["ends {mean:+.3f nats} behind with 4 layers, in {seeds} seeds"]}),
    Passage(
        conditioning.heads_values,
        {
            FINDINGS: [
                "κ falls {falls[0]:.0f}-fold at fixed head dimension and {falls[1]:.0f}-fold at fixed total width",
                "Gaussian matrices from {gaussian[2]:.1f} to {gaussian[16]:.1f}, and",
            ],
        },
    ),
    Passage(
        conditioning.causes_values,
        {
            FINDINGS: [
                "In {runs} runs of a small ViT",
                "more heads {slope[heads]:+.1f}; interventions {slope[interventions]:+.1f} over seeds,",
                "That κ alone decides is {verdict} by the plan's rule.",
                "the slope is {gaining:+.1f}, without the strongest loser alone {rest:+.1f}:",
            ],
        },
    ),
    Passage(
        tasks.nearest,
        {FINDINGS: ["error {rank[16].value:.3f} with one head of 16, {rank[8].value:.3f} with two of 8."]},
    ),
    Passage(
        tasks.diagnostic,
        {FINDINGS: ["{retrieval[1]:.3f} with one, {retrieval[12]:.3f} with twelve."]},
    ),
]
