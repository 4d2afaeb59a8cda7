//! The namespace: a digest of every property that makes the bytes of two engines interchangeable; and the
//! differences of two namespaces.

use std::collections::BTreeMap;
use std::fmt::Write;

use sha2::{Digest, Sha256};

pub use crate::handshake::WEIGHTS_LIVE;
use crate::key::NamespaceDigest;

/// The facts an engine states about itself, by name.
pub type Facts = BTreeMap<String, String>;

/// Most characters of a fact in the one line of a namespace: a page descriptor. The rest is cut, and eight
/// digits of a digest follow.
const LINE_VALUE_MAX: usize = 160;
/// Most characters of a fact in an explanation: a page descriptor of a few kinds of layers.
const EXPLAINED_VALUE_MAX: usize = 512;
/// The fact `group_kind` of layers with a state, and without KV of each token.
pub const STATE_KIND: &str = "state";
/// Most differences named by an explanation, causes first. With two values of 2,048 bytes each, all fit a
/// record.
const EXPLAINED_MAX: usize = 8;

/// Facts, the most telling first, each with the remedy by which two engines agree on it.
const REMEDIES: &[(&str, &str)] = &[
    ("model", "serve the same model on both, or name the same weights alike on both"),
    (
        "weights",
        "load the same weight files on both (`pillion facts --weights DIR` digests them), or name the same weights alike on both",
    ),
    (
        WEIGHTS_LIVE,
        "the weights that run differ, or one side cannot sample them: load the same weights by the same release of \
         the engine on both, and after an update in place update both",
    ),
    ("revision", "load the same revision of the model on both"),
    ("quantization", "quantise weights in the same way on both"),
    ("dtype", "compute in the same type on both"),
    ("config", "give both the same model configuration, including its overrides"),
    (
        "rotary",
        "give both the same rope parameters, and with LongRoPE the same longest context, by which its factors are chosen",
    ),
    ("drafter", "draft tokens with the same model on both"),
    ("lora", "allow adapters on both or on neither"),
    ("hash_algorithm", "hash blocks with the same algorithm on both"),
    ("none_hash", "NONE_HASH differs: set PYTHONHASHSEED to the same value on both"),
    (
        "extra_keys",
        "write extra keys in the same form on both: vLLM since 0.31 tags them, earlier ones do not",
    ),
    ("tensor_parallel_size", "divide blocks between the same number of ranks on both"),
    ("block_tokens", "put the same number of tokens into a block on both"),
    ("kv_dtype", "keep KV in the same type on both"),
    ("kv_quant", "quantise KV in the same way on both"),
    ("attention_backend", "compute attention with the same backend on both"),
    ("page_form", "use the same layout and attention backend on both: pages are not converted"),
    (
        "layers",
        "name, count and order the model's cache layers in the same way on both, as the same release of an engine does",
    ),
    ("group_kind", "give the layers the same windows on both, as the same model configuration does"),
    ("page_bytes", "it follows from the model, block_tokens, kv_dtype and tensor_parallel_size"),
];
const UNKNOWN_REMEDY: &str = "state the same on both";

/// A fact with different values in two engines.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Difference<'a> {
    /// The fact.
    pub name: &'a str,
    /// The value of this engine, if it states the fact.
    pub ours: Option<&'a str>,
    /// The value of the other engine, if it states the fact.
    pub theirs: Option<&'a str>,
    /// The remedy by which the two agree.
    pub remedy: &'static str,
}

/// Returns the namespace of an engine: the first 16 bytes of SHA-256 over the CBOR map of its facts, sorted
/// by name.
pub fn digest(facts: &Facts) -> NamespaceDigest {
    truncate(Sha256::digest(crate::handshake::encode(facts)).as_slice())
}

/// Returns the digest of the samples of all ranks, in the order of ranks; `None` if no rank has a sample. A
/// rank without a sample among others counts with zeros.
pub fn weights_live(ranks: impl IntoIterator<Item = Option<[u8; 16]>>) -> Option<[u8; 16]> {
    let (mut hasher, mut any) = (Sha256::new(), false);
    for live in ranks {
        any |= live.is_some();
        hasher.update([u8::from(live.is_some())]);
        hasher.update(live.unwrap_or_default());
    }
    any.then(|| truncate(hasher.finalize().as_slice()).0)
}

/// Returns the facts of an engine: the statements of its ranks, and the digest of the weights of all ranks,
/// if known.
pub fn complete(stated: &Facts, live: Option<[u8; 16]>) -> Facts {
    let mut facts = stated.clone();
    facts.extend(live.map(|live| (WEIGHTS_LIVE.to_owned(), NamespaceDigest(live).to_string())));
    facts
}

/// True if blocks are of use without the first blocks of their chain: all layers have windows, or states.
pub fn has_parentless_blocks(facts: &Facts) -> bool {
    let reads_its_end = |kind: &str| kind.starts_with("window ") || kind == STATE_KIND;
    facts.get("group_kind").is_some_and(|kinds| kinds.split(", ").all(reads_its_end))
}

/// Returns the next generation of a namespace, after its cache was reset: a digest of the old one and 16
/// random bytes.
pub fn salted(namespace: NamespaceDigest, salt: [u8; 16]) -> NamespaceDigest {
    let mut hasher = Sha256::new();
    hasher.update(namespace.0);
    hasher.update(salt);
    truncate(hasher.finalize().as_slice())
}

/// Returns a namespace and its facts in one line, the same from an engine and from the sidecar. Two lines
/// differ at each differing fact.
pub fn line(facts: &Facts) -> String {
    let mut line = format!("namespace {}", digest(facts));
    for (name, _) in ordered(facts.keys().map(String::as_str)) {
        let value = &facts[name];
        let mut shown = shorten(value, LINE_VALUE_MAX);
        if shown.contains(char::is_whitespace) {
            shown = format!("'{shown}'");
        }
        write!(line, " {}={shown}", shorten(name, LINE_VALUE_MAX)).expect("a String takes all");
    }
    line
}

/// Returns the facts with different values in two engines, the most telling first.
pub fn differences<'a>(ours: &'a Facts, theirs: &'a Facts) -> Vec<Difference<'a>> {
    let names = ours.keys().chain(theirs.keys().filter(|name| !ours.contains_key(*name)));
    let both = ordered(names.map(String::as_str)).into_iter().map(|(name, remedy)| Difference {
        name,
        ours: ours.get(name).map(String::as_str),
        theirs: theirs.get(name).map(String::as_str),
        remedy,
    });
    both.filter(|difference| difference.ours != difference.theirs).collect()
}

/// Explains why an engine with the facts `ours` does not share with one with the facts `theirs`, and how to
/// change that. The text has both page descriptors if they differ.
pub fn explain(ours: &Facts, theirs: &Facts) -> String {
    let found = differences(ours, theirs);
    let same = |name: &str| found.iter().all(|difference| difference.name != name);
    let same_model = same("model") && same("weights");
    let mut text = String::from(match (same_model, same("page_form")) {
        (true, true) => "same model and layout",
        (true, false) => "same model, different pages",
        (false, _) => "another model",
    });
    for difference in found.iter().take(EXPLAINED_MAX) {
        let shown = |value: Option<&str>| {
            value.map_or("nothing".into(), |value| format!("'{}'", shorten(value, EXPLAINED_VALUE_MAX)))
        };
        let (name, ours, theirs) =
            (shorten(difference.name, LINE_VALUE_MAX), shown(difference.ours), shown(difference.theirs));
        write!(text, "; {name} is {ours} here and {theirs} there ({})", difference.remedy)
            .expect("a String takes all");
    }
    if found.len() > EXPLAINED_MAX {
        write!(text, "; and {} more", found.len() - EXPLAINED_MAX).expect("a String takes all");
    }
    text
}

/// Returns every fact known by name, the most telling first, each with the remedy by which two engines agree
/// on it.
pub fn agreements() -> impl Iterator<Item = (&'static str, &'static str)> {
    REMEDIES.iter().copied()
}

/// Returns names with their remedies: those of the table in its order, then the rest.
fn ordered<'a>(names: impl Iterator<Item = &'a str>) -> Vec<(&'a str, &'static str)> {
    let place = |name: &str| REMEDIES.iter().position(|(known, _)| *known == name);
    let mut placed: Vec<_> = names.map(|name| (place(name).unwrap_or(REMEDIES.len()), name)).collect();
    placed.sort_unstable();
    let remedy = |place: usize| REMEDIES.get(place).map_or(UNKNOWN_REMEDY, |(_, remedy)| *remedy);
    placed.into_iter().map(|(place, name)| (name, remedy(place))).collect()
}

/// Prepares a peer's text for a log: no control characters, at most `most` characters, and a digest of a
/// longer text.
fn shorten(text: &str, most: usize) -> String {
    let plain = |text: &str| -> String {
        let shown = |ch: char| if ch.is_control() { char::REPLACEMENT_CHARACTER } else { ch };
        text.chars().map(shown).collect()
    };
    match text.char_indices().nth(most) {
        None => plain(text),
        Some((end, _)) => {
            let rest = truncate(Sha256::digest(text).as_slice()).to_string();
            format!("{}..{}", plain(&text[..end]), &rest[..8])
        }
    }
}

fn truncate(digest: &[u8]) -> NamespaceDigest {
    NamespaceDigest(digest[..16].try_into().expect("SHA-256 has 32 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(changed: &[(&str, &str)]) -> Facts {
        let usual =
            [("model", "tiny"), ("none_hash", "aa"), ("page_form", "tokens=32"), ("block_tokens", "32")];
        usual.iter().chain(changed).map(|(name, value)| ((*name).into(), (*value).into())).collect()
    }

    #[test]
    fn another_seed_is_explained_with_its_remedy() {
        let (ours, theirs) = (facts(&[]), facts(&[("none_hash", "bb")]));
        assert_eq!(
            explain(&ours, &theirs),
            "same model and layout; none_hash is 'aa' here and 'bb' there (NONE_HASH differs: set PYTHONHASHSEED to the \
             same value on both)"
        );
        assert_ne!(line(&ours), line(&theirs));
        assert_eq!(
            line(&ours),
            format!(
                "namespace {} model=tiny none_hash=aa block_tokens=32 page_form=tokens=32",
                digest(&ours)
            )
        );
    }

    #[test]
    fn the_weights_of_all_ranks_are_one_fact() {
        let (ours, theirs) = (Some([7; 16]), Some([8; 16]));
        assert_eq!(weights_live([None, None]), None);
        let lives =
            [[ours, ours], [ours, theirs], [theirs, ours], [ours, None], [None, ours]].map(weights_live);
        for (at, live) in lives.iter().enumerate() {
            assert!(live.is_some() && !lives[..at].contains(live), "{at}");
        }
        assert_ne!(weights_live([ours]), weights_live([ours, None]), "a rank more");
        let stated = facts(&[]);
        assert_eq!(complete(&stated, None), stated);
        let all = complete(&stated, lives[0]);
        assert_eq!(all[WEIGHTS_LIVE], NamespaceDigest(lives[0].unwrap()).to_string());
        assert_eq!(differences(&stated, &all).len(), 1, "absent is not equal");
    }

    #[test]
    fn causes_come_before_what_follows_from_them_and_both_descriptors_are_there() {
        let theirs = facts(&[("page_form", "tokens=16"), ("block_tokens", "16"), ("mine", "1")]);
        let ours = facts(&[]);
        let found = differences(&ours, &theirs);
        let names: Vec<_> = found.iter().map(|difference| difference.name).collect();
        assert_eq!(names, ["block_tokens", "page_form", "mine"]);
        assert_eq!((found[2].ours, found[2].theirs, found[2].remedy), (None, Some("1"), UNKNOWN_REMEDY));
        let text = explain(&ours, &theirs);
        assert!(
            text.starts_with("same model, different pages; block_tokens is '32' here and '16' there"),
            "{text}"
        );
        assert!(text.contains("page_form is 'tokens=32' here and 'tokens=16' there"), "{text}");
        assert!(text.contains("mine is nothing here and '1' there"), "{text}");
    }

    #[test]
    fn whatever_a_peer_states_its_texts_are_plain_and_explanations_fit_a_record() {
        let long = |fill: char| fill.to_string().repeat(60_000);
        let (mut ours, mut theirs) = (facts(&[]), facts(&[("model", "a\nb\u{1b}c")]));
        for number in 0..100 {
            ours.insert(format!("{number}{}", long('x')), long('\n'));
            theirs.insert(format!("{number}{}", long('y')), format!("{}1", long('\u{10ffff}')));
        }
        let text = explain(&ours, &theirs);
        assert!(text.len() < crate::handshake::RECORD_BYTES_MAX * 3 / 4, "{}", text.len());
        for text in [text, line(&theirs)] {
            assert!(!text.contains(|ch: char| ch.is_control()));
        }
        let other = |end: &str| line(&facts(&[("model", &format!("{}{end}", long('m')))]))[43..].to_owned();
        assert_ne!(other("1"), other("2"), "told apart by what is not shown, too");
    }
}
