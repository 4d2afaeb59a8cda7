//! The API and the target of a request, by its method and path. No I/O.

use hyper::Method;
use percent_encoding::percent_decode_str;

sidecar::named! {
    /// An API with prompts for two engines, by its path.
    pub(super) enum Api {
        Completions = "/v1/completions",
        Chat = "/v1/chat/completions",
        Responses = "/v1/responses",
        Messages = "/v1/messages",
        Generate = "/inference/v1/generate",
    }
}

/// The engines for a request.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum RequestTarget {
    Prompt(Api),
    /// The engine with the stored response of this id.
    Stored(String),
    /// All engines of both roles: the request changes their answers.
    Everywhere,
    /// No engine: the client gets this text.
    Nowhere(&'static str),
    /// Any one decode engine.
    One,
}

/// Requests that change an engine's answers, and mean the same at each engine.
const EVERYWHERE: [&str; 15] = [
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/pause",
    "/resume",
    "/sleep",
    "/wake_up",
    "/release_kv_cache_memory",
    "/abort_requests",
    "/inference/v1/abort_requests",
    "/start_profile",
    "/stop_profile",
    "/update_weight_version",
];
/// Requests with addresses, ranks or sizes of one engine.
const NOWHERE: [&str; 10] = [
    "/collective_rpc",
    "/scale_elastic_ep",
    "/fault_tolerance/apply",
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
    "/start_weight_update",
    "/start_draft_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/weight_checker",
];
const NOWHERE_TEXT: &str = "this request has addresses or ranks of one engine: send it to each engine by its own address, prefill engines too";
/// The path of stored responses, before their ids.
const RESPONSES: &str = "/v1/responses/";

// === impl RequestTarget ===

impl RequestTarget {
    /// The target of a request. Its path may have a prefix, as by vLLM's `--root-path`.
    pub(super) fn of_request(method: &Method, path: &str) -> Self {
        let path = path.split('?').next().unwrap_or_default();
        // Engines decode the path too.
        let path = percent_decode_str(path).decode_utf8_lossy();
        if let Some(at) = path.find(RESPONSES) {
            let id = path[at + RESPONSES.len()..].split('/').next().unwrap_or_default();
            if !id.is_empty() && id != "render" {
                return Self::Stored(id.to_owned());
            }
        }
        if method != Method::POST {
            return Self::One;
        }
        let is_asked = |known: &&str| path.ends_with(*known);
        if let Some(api) = Api::ALL.into_iter().find(|api| path.ends_with(api.name())) {
            return Self::Prompt(api);
        }
        if EVERYWHERE.iter().any(is_asked) {
            return Self::Everywhere;
        }
        if NOWHERE.iter().any(is_asked) { Self::Nowhere(NOWHERE_TEXT) } else { Self::One }
    }
}

/// The path without a slash at its end: an engine would redirect the client to the engine's own address.
pub(super) fn without_slash(path: &str) -> String {
    let (path, query) = path.split_once('?').map_or((path, None), |(path, query)| (path, Some(query)));
    let path = path.trim_end_matches('/');
    let path = if path.is_empty() { "/" } else { path };
    query.map_or_else(|| path.to_owned(), |query| format!("{path}?{query}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn posted(path: &str) -> RequestTarget {
        RequestTarget::of_request(&Method::POST, path)
    }

    #[test]
    fn requests_have_targets_also_behind_a_prefix() {
        for prefix in ["", "/llm", "/a/b"] {
            for api in Api::ALL {
                assert_eq!(posted(&format!("{prefix}{}?a=b", api.name())), RequestTarget::Prompt(api));
            }
            for path in EVERYWHERE {
                assert_eq!(posted(&format!("{prefix}{path}")), RequestTarget::Everywhere, "{path}");
            }
            for path in NOWHERE {
                assert_eq!(
                    posted(&format!("{prefix}{path}")),
                    RequestTarget::Nowhere(NOWHERE_TEXT),
                    "{path}"
                );
            }
            for path in ["", "/cancel", "/input_items?limit=3"] {
                let stored = RequestTarget::Stored("resp_1".into());
                assert_eq!(posted(&format!("{prefix}/v1/responses/resp_1{path}")), stored);
                assert_eq!(
                    RequestTarget::of_request(&Method::GET, &format!("{prefix}/v1/responses/resp_1{path}")),
                    stored
                );
            }
        }
        assert_eq!(posted("/v1/%63ompletions"), RequestTarget::Prompt(Api::Completions));
        for path in [
            "/v1/embeddings",
            "/v1/chat/completions/batch",
            "/v1/messages/count_tokens",
            "/v1/responses/render",
            "/",
        ] {
            assert_eq!(posted(path), RequestTarget::One, "{path}");
        }
        assert_eq!(RequestTarget::of_request(&Method::GET, "/v1/completions"), RequestTarget::One);
    }

    #[test]
    fn paths_end_without_a_slash() {
        for (path, made) in [("/v1/a/", "/v1/a"), ("/v1/a/?b=/", "/v1/a?b=/"), ("/", "/"), ("/a", "/a")] {
            assert_eq!(without_slash(path), made);
        }
    }
}
