"""An advantage estimator of your own: the reward less the *median* of its group (see custom_advantage.yaml)."""

import torch

from configs.algorithms import needs
from configs.schema import AdvantageConfig
from trainer.algorithms.advantages import AdvantageInputs, AdvantageOutputs


@needs(groups=True)  # several samples a prompt; critic=True and greedy=True ask for values and for a greedy response
def median_baseline(inputs: AdvantageInputs, settings: AdvantageConfig) -> AdvantageOutputs:
    """Unlike the mean, the median is not moved by one sample with an extreme reward.

    Shapes: N responses, T columns; `inputs.mask` [N, T] marks trained tokens, `inputs.keep` [N] samples that have a reward.
    """
    outcomes = inputs.outcomes()  # [N], the KL penalty included
    baseline = torch.zeros_like(outcomes)
    for prompt in inputs.group.unique():
        members = (inputs.group == prompt) & inputs.keep
        if members.any():
            baseline[members] = outcomes[members].quantile(0.5)
    advantages = torch.where(inputs.mask, (outcomes - baseline)[:, None], 0.0)
    returns = torch.where(inputs.mask, outcomes[:, None], 0.0)
    return AdvantageOutputs(advantages, returns)
