//! The judgement of a handover: the decode engine had the prompt, or computed it again. No I/O.

use super::usage::Usage;

sidecar::named! {
    /// The result of a handover, as the label `result`.
    pub(super) enum HandedOver {
        Taken = "taken",
        /// The decode engine computed the prompt again.
        Recomputed = "recomputed",
        /// The decode engine states no cached tokens.
        Unstated = "unstated",
    }
}

// === impl HandedOver ===

impl HandedOver {
    /// The result by the cached tokens of both engines; `None` where the decode engine states none. It has computed the prompt again if it
    /// computed at least half as many tokens as the prefill engine, and `tokens_min`: a short rest is its own.
    pub(super) fn judge_usage(answered: Usage, computed: Usage, tokens_min: u64) -> Option<Self> {
        let prompt = answered.prompt_tokens?;
        let again = prompt.saturating_sub(answered.cached_tokens?);
        let first =
            computed.prompt_tokens.unwrap_or(prompt).saturating_sub(computed.cached_tokens.unwrap_or(0));
        let is_again = again >= tokens_min && again.saturating_mul(2) >= first;
        Some(if is_again { Self::Recomputed } else { Self::Taken })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_was_computed_again_where_the_second_engine_computed_half_of_it() {
        let usage = |prompt, cached| Usage { prompt_tokens: Some(prompt), cached_tokens: cached };
        let result = |answered, computed| HandedOver::judge_usage(answered, computed, 256);
        let cold = usage(900, Some(0));
        assert_eq!(result(usage(900, Some(899)), cold), Some(HandedOver::Taken));
        assert_eq!(result(usage(900, Some(0)), cold), Some(HandedOver::Recomputed));
        assert_eq!(result(usage(900, Some(450)), cold), Some(HandedOver::Recomputed));
        assert_eq!(result(usage(900, Some(451)), cold), Some(HandedOver::Taken), "less than half");
        assert_eq!(result(usage(900, Some(0)), Usage::default()), Some(HandedOver::Recomputed));
        // Both have the conversation, and the second engine lacks the turn.
        assert_eq!(result(usage(9000, Some(8000)), usage(9000, Some(8000))), Some(HandedOver::Recomputed));
        assert_eq!(
            result(usage(9000, Some(8800)), usage(9000, Some(8800))),
            Some(HandedOver::Taken),
            "a short rest"
        );
        assert_eq!(result(usage(900, None), cold), None);
        assert_eq!(result(Usage::default(), cold), None);
    }
}
