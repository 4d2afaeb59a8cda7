//! Options against an engine's other settings.

use super::OptionError;

/// An engine's settings, for its options to fit.
#[derive(Clone, Copy, Debug)]
pub struct EngineSettings {
    /// True if the engine loads blocks.
    pub loads: bool,
    /// True if `load` is `sync`.
    pub sync: bool,
    /// True if `strict_tokens` is given.
    pub strict: bool,
    /// True if there are several cache groups.
    pub several: bool,
    /// True if a failed load ends no request: the engine computes it.
    pub recomputes: bool,
    /// True if a step may wait for a load.
    pub waits: bool,
    /// True if KV is in GPU memory.
    pub on_gpu: bool,
}

// === impl EngineSettings ===

impl EngineSettings {
    /// Refuses unfit options; returns warnings of surprising ones.
    pub fn check_options(&self) -> Result<Vec<String>, OptionError> {
        if self.strict && (self.several || self.recomputes) {
            return Err(OptionError::Unfit(
                "pillion.strict_tokens needs loads that fail to end their requests: set kv_load_failure_policy to fail and \
                 serve a model with one cache group, or leave the option out",
            ));
        }
        let mut warnings = Vec::new();
        if !self.recomputes && !self.strict && self.loads {
            warnings.push(
                "a request whose blocks cannot be loaded will end with an error: set kv_load_failure_policy to recompute in \
                 --kv-transfer-config"
                    .to_owned(),
            );
        }
        if self.sync && !self.waits {
            let why = match self.on_gpu {
                true => "this engine copies for itself (pillion.copy=engine)",
                false => "KV lies in host memory",
            };
            warnings.push(format!(
                "pillion.load=sync has no effect because {why}, and tokens computed from a load that fails could be answered. \
                 Loads are asynchronous: leave the option out"
            ));
        }
        Ok(warnings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: EngineSettings = EngineSettings {
        loads: true,
        sync: false,
        strict: false,
        several: false,
        recomputes: true,
        waits: false,
        on_gpu: false,
    };

    fn warnings(settings: EngineSettings) -> Vec<String> {
        settings.check_options().expect("settings that fit")
    }

    #[test]
    fn a_strict_engine_has_one_group_and_ends_requests_of_failed_loads() {
        let strict = EngineSettings { strict: true, recomputes: false, ..PLAIN };
        assert_eq!(warnings(strict), Vec::<String>::new());
        for unfit in
            [EngineSettings { recomputes: true, ..strict }, EngineSettings { several: true, ..strict }]
        {
            let refused = unfit.check_options().expect_err("they do not fit").to_string();
            assert!(refused.contains("set kv_load_failure_policy to fail"), "{refused}");
        }
    }

    #[test]
    fn an_end_of_requests_is_warned_of_where_blocks_are_loaded() {
        let ends = EngineSettings { recomputes: false, ..PLAIN };
        assert!(warnings(ends)[0].contains("will end with an error"));
        assert_eq!(warnings(EngineSettings { loads: false, ..ends }), Vec::<String>::new());
        assert_eq!(warnings(PLAIN), Vec::<String>::new());
    }

    #[test]
    fn synchronous_loads_are_warned_of_where_no_step_waits() {
        let sync = EngineSettings { sync: true, ..PLAIN };
        assert!(warnings(sync)[0].contains("KV lies in host memory"));
        assert!(warnings(EngineSettings { on_gpu: true, ..sync })[0].contains("pillion.copy=engine"));
        assert_eq!(warnings(EngineSettings { waits: true, on_gpu: true, ..sync }), Vec::<String>::new());
    }
}
