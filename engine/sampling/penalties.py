"""Repetition, presence and frequency penalties, over the tokens that a sequence has and not over the vocabulary.

repetition   of each token in prompt or answer: a positive logit is divided by it, a negative one multiplied (CTRL,
             Keskar et al. 2019)
presence     subtracted from each token that is in the answer
frequency    subtracted from it as often as it is there
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Penalties:
    """Of those rows of a batch that have any.

    rows        [n] int64, which ones
    slots       [n] int64, where their tokens are kept
    num_prompt  [n, 1] int64, tokens of the prompt
    repetition  [n, 1] fp32, and presence, frequency
    """

    rows: torch.Tensor
    slots: torch.Tensor
    num_prompt: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor

    def apply(self, logits: torch.Tensor, token_ids: torch.Tensor, lengths: torch.Tensor) -> None:
        """Change `logits` [rows, vocab] in place.

        token_ids  [n, longest] int64, prompt and answer of each penalised row, anything past its end
        lengths    [n, 1] int64, at least 1
        """
        at = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
        in_answer = (at >= self.num_prompt) & (at < lengths)
        # A token may occur often. Every occurrence writes the same new value, and what lies past a row's end, or
        # outside what a penalty looks at, is made one more occurrence of the row's last token.
        last = token_ids.gather(1, lengths - 1)
        flat, first_of_row = logits.view(-1), self.rows.unsqueeze(1) * logits.shape[1]
        everywhere = first_of_row + token_ids.where(at < lengths, last)
        answered = first_of_row + token_ids.where(in_answer, last)

        before = flat[everywhere]
        flat[everywhere] = torch.where(before > 0, before / self.repetition, before * self.repetition)
        flat[answered] = flat[answered] - self.presence.where(lengths > self.num_prompt, 0.0)
        flat.index_add_(0, answered.view(-1), -(in_answer * self.frequency).view(-1))
