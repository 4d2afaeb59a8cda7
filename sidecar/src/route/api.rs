//! What a request asks for, by its method and path. No I/O.

use hyper::Method;

/// An API whose prompts two engines may work on.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Api {
    Completions,
    Chat,
    Responses,
    Messages,
    Generate,
}

// === impl Api ===

impl Api {
    const ALL: [Self; 5] = [Self::Completions, Self::Chat, Self::Responses, Self::Messages, Self::Generate];

    fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
            Self::Generate => "/inference/v1/generate",
        }
    }

    /// The API of a request; `path` may have a prefix, as by vLLM's `--root-path`.
    pub(super) fn of(method: &Method, path: &str) -> Option<Self> {
        let path = path.split('?').next().unwrap_or_default();
        let is_asked = |api: &Self| path.ends_with(api.path());
        (method == Method::POST).then(|| Self::ALL.into_iter().find(is_asked)).flatten()
    }
}
