//! Extra keys: the inputs of a block's KV beside its tokens.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::KeyError;

crate::named! {
    /// The form in which extra keys are hashed.
    #[derive(Default, Deserialize)]
    #[serde(try_from = "String")]
    pub enum ExtraForm {
        /// vLLM 0.31 and later: tuples, each with its kind first.
        #[default]
        Tagged = "tagged",
        /// vLLM up to 0.30: values alone.
        Bare = "bare",
    }
}

/// One extra key of a block. JSON has vLLM's form, tuples as arrays and bytes as `{"bytes": hex}`; bare forms
/// are read too.
#[derive(Clone, Eq, PartialEq, Debug, Deserialize)]
#[serde(try_from = "Captured")]
pub enum ExtraKey {
    /// The request's LoRA adapter; the path is hashed in the tagged form alone.
    Lora {
        /// Its name.
        name: String,
        /// The path it was loaded from.
        path: String,
    },
    /// An image or another input within the block.
    Multimodal {
        /// Its hash or uuid.
        identifier: String,
        /// Its begin, in tokens from the block's begin; negative if before it.
        offset: i64,
    },
    /// The request's salt, on its first block.
    CacheSalt(String),
    /// SHA-256 of the block's prompt embeddings.
    PromptEmbeds(Vec<u8>),
    /// A LoRA name or a salt, the caller does not know which; for the bare form alone.
    Text(String),
}

/// A scalar inside an extra key.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(super) enum Atom<'a> {
    Text(&'a str),
    Integer(i64),
    Bytes(&'a [u8]),
}

/// An extra key as it is hashed: a scalar, or a tuple of them.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(super) enum Item<'a> {
    Scalar([Atom<'a>; 1]),
    Pair([Atom<'a>; 2]),
    Triple([Atom<'a>; 3]),
}

/// An extra key in JSON, before its kind is known.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "an extra key has an unknown form: pass [\"lora\", name, path], [\"mm\", identifier, offset], \
         [\"cache_salt\", salt], [\"prompt_embeds\", {\"bytes\": hex}], or the same without the first word in the bare \
         form"
)]
enum Captured {
    Text(String),
    Bytes(CapturedBytes),
    Offset(String, i64),
    Texts(String, String),
    TextBytes(String, CapturedBytes),
    ThreeTexts(String, String, String),
    TextsOffset(String, String, i64),
}

/// `{"bytes": hex}`: a map, because serde would read a struct from an array too.
type CapturedBytes = BTreeMap<String, String>;

read_by_name!(ExtraForm, "form", "tagged (vLLM 0.31 and later), bare (up to 0.30)");

// === impl ExtraKey ===

impl ExtraKey {
    /// Fails if the extra key cannot be hashed in this form.
    pub(super) fn check(&self, form: ExtraForm) -> Result<(), KeyError> {
        match (self, form) {
            (Self::Text(text), ExtraForm::Tagged) => Err(KeyError::Untagged(text.clone())),
            _ => Ok(()),
        }
    }

    /// Returns the hashed values. The caller has checked the key for this form.
    pub(super) fn item(&self, form: ExtraForm) -> Item<'_> {
        use Atom::{Bytes, Integer, Text};
        match (form, self) {
            (ExtraForm::Tagged, Self::Lora { name, path }) => {
                Item::Triple([Text("lora"), Text(name), Text(path)])
            }
            (ExtraForm::Tagged, Self::Multimodal { identifier, offset }) => {
                Item::Triple([Text("mm"), Text(identifier), Integer(*offset)])
            }
            (ExtraForm::Tagged, Self::CacheSalt(salt)) => Item::Pair([Text("cache_salt"), Text(salt)]),
            (ExtraForm::Tagged, Self::PromptEmbeds(digest)) => {
                Item::Pair([Text("prompt_embeds"), Bytes(digest)])
            }
            (ExtraForm::Bare, Self::Multimodal { identifier, offset }) => {
                Item::Pair([Text(identifier), Integer(*offset)])
            }
            (ExtraForm::Bare, Self::PromptEmbeds(digest)) => Item::Scalar([Bytes(digest)]),
            (ExtraForm::Bare, Self::Lora { name: text, .. } | Self::CacheSalt(text))
            | (_, Self::Text(text)) => Item::Scalar([Text(text)]),
        }
    }
}

impl TryFrom<Captured> for ExtraKey {
    type Error = String;

    fn try_from(captured: Captured) -> Result<Self, String> {
        let unknown = |tag: &str| {
            Err(format!(
                "'{tag}' is not a kind of extra key: pass one of lora, mm, cache_salt, prompt_embeds"
            ))
        };
        Ok(match captured {
            Captured::Text(text) => Self::Text(text),
            Captured::Bytes(bytes) => Self::PromptEmbeds(decode(&bytes)?),
            Captured::Offset(identifier, offset) => Self::Multimodal { identifier, offset },
            Captured::Texts(tag, salt) if tag == "cache_salt" => Self::CacheSalt(salt),
            Captured::TextBytes(tag, bytes) if tag == "prompt_embeds" => Self::PromptEmbeds(decode(&bytes)?),
            Captured::ThreeTexts(tag, name, path) if tag == "lora" => Self::Lora { name, path },
            Captured::TextsOffset(tag, identifier, offset) if tag == "mm" => {
                Self::Multimodal { identifier, offset }
            }
            Captured::Texts(tag, _)
            | Captured::TextBytes(tag, _)
            | Captured::ThreeTexts(tag, ..)
            | Captured::TextsOffset(tag, ..) => return unknown(&tag),
        })
    }
}

fn decode(captured: &CapturedBytes) -> Result<Vec<u8>, String> {
    match captured.iter().collect::<Vec<_>>()[..] {
        [(name, digits)] if name == "bytes" => {
            hex::decode(digits).map_err(|error| format!("bytes of an extra key are not hex digits: {error}"))
        }
        _ => Err("bytes of an extra key have another form than {\"bytes\": hex}".to_owned()),
    }
}

// === impl Item ===

impl<'a> Item<'a> {
    pub(super) fn is_tuple(&self) -> bool {
        !matches!(self, Self::Scalar(_))
    }

    pub(super) fn atoms(&self) -> &[Atom<'a>] {
        match self {
            Self::Scalar(atoms) => atoms,
            Self::Pair(atoms) => atoms,
            Self::Triple(atoms) => atoms,
        }
    }
}

// === impl Atom ===

impl Atom<'_> {
    /// Returns the bytes of a text or byte string; 0 for an integer.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Integer(_) => 0,
            Self::Bytes(bytes) => bytes.len(),
        }
    }
}
