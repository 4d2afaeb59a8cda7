//! The namespaces of a sidecar, for an engine to join one.

use std::path::Path;

use shm_protocol::namespace::{self, Facts};
use shm_protocol::page_form::{self, Page, PageFormError};
use shm_protocol::weight_files;

use serde_json::Value;

use crate::{ControlAddress, EngineError};

/// Engines with interchangeable KV: their facts, and the form of their blocks.
#[derive(Clone, Debug)]
pub struct Namespace {
    /// None: the facts are the engine's own.
    digest: Option<String>,
    facts: Facts,
    block_bytes: u64,
    pages: Result<Vec<Page>, PageFormError>,
}

/// The fact `weights` of a folder with safetensors files: vLLM states the same of the same files.
pub fn digest_weights(folder: impl AsRef<Path>) -> Result<String, EngineError> {
    let folder = folder.as_ref();
    let wrong = |why: String| {
        EngineError::Weights(format!(
            "{} {why}: pass the folder that the model was loaded from",
            folder.display()
        ))
    };
    let digest =
        weight_files::digest_files(folder).map_err(|error| wrong(format!("cannot be read ({error})")))?;
    digest.ok_or_else(|| wrong("has no safetensors files".into()))
}

// === impl Namespace ===

impl Namespace {
    /// The only namespace of the sidecar at `socket` in agreement with all `stated` facts of this engine, such as `weights`
    /// ([`digest_weights`]) and `dtype` ("torch.float32"). Facts not stated are taken over from the namespace, until the engine has
    /// proven itself. The control socket beside `socket` is asked.
    ///
    /// Fails if none or several agree; the text names the differing facts and the remedies.
    pub fn find(socket: impl AsRef<Path>, stated: &Facts) -> Result<Self, EngineError> {
        Self::find_at(&ControlAddress::beside(socket), stated)
    }

    /// [`Namespace::find`] by another control.
    pub fn find_at(control: &ControlAddress, stated: &Facts) -> Result<Self, EngineError> {
        let mut all = Self::list(control)?;
        if all.is_empty() {
            return Err(EngineError::NoNamespace(
                "the sidecar knows no namespace: let vLLM answer one prompt first".into(),
            ));
        }
        let differing: Vec<Vec<String>> = all.iter().map(|namespace| namespace.differences(stated)).collect();
        if differing.iter().all(|found| !found.is_empty()) {
            let lines = all.iter().zip(&differing).flat_map(|(namespace, found)| {
                found.iter().map(move |text| format!("\n{}: {text}", namespace.digest()))
            });
            let lines: String = lines.collect();
            return Err(EngineError::NoNamespace(format!(
                "this engine agrees with no namespace of the sidecar:{lines}"
            )));
        }
        let mut same = differing.into_iter();
        all.retain(|_| same.next().is_some_and(|found| found.is_empty()));
        match all.as_slice() {
            [one, other, ..] => Err(EngineError::SeveralNamespaces(one.apart_from(other))),
            _ => Ok(all.remove(0)),
        }
    }

    /// All namespaces with known facts, of the sidecar and of its peers.
    pub fn list(control: &ControlAddress) -> Result<Vec<Self>, EngineError> {
        Ok(control.namespaces()?.iter().filter_map(Self::of_entry).collect())
    }

    /// The namespace of an engine with facts of its own, with blocks of so many shards. The first engine of a kind makes its namespace this
    /// way. Fails without a readable `page_form`.
    pub fn stated(facts: Facts, shards: u32) -> Result<Self, EngineError> {
        let form = facts
            .get("page_form")
            .ok_or_else(|| EngineError::NoNamespace("state the fact page_form".into()))?;
        let pages = page_form::parse_pages(form)?;
        let shard: u64 = pages.iter().map(|page| u64::from(page.layers) * page.page_bytes()).sum();
        Ok(Self { digest: None, block_bytes: u64::from(shards) * shard, pages: Ok(pages), facts })
    }

    fn of_entry(entry: &Value) -> Option<Self> {
        let facts: Facts = serde_json::from_value(entry.get("facts")?.clone()).ok()?;
        let digest = Some(entry.get("namespace")?.as_str()?.to_owned());
        let block_bytes = entry.get("block_bytes")?.as_u64()?;
        let pages = page_form::parse_pages(facts.get("page_form").map_or("", String::as_str));
        Some(Self { digest, facts, block_bytes, pages })
    }

    /// The differences from an engine with these facts, each with its remedy.
    fn differences(&self, stated: &Facts) -> Vec<String> {
        let theirs: Facts = self
            .facts
            .iter()
            .filter(|(name, _)| stated.contains_key(*name))
            .map(|(n, v)| (n.clone(), v.clone()))
            .collect();
        let shown = |value: Option<&str>| value.map_or("nothing".into(), |value| format!("'{value}'"));
        let found = namespace::list_differences(stated, &theirs);
        let texts = found.iter().map(|differs| {
            let (ours, theirs) = (shown(differs.ours), shown(differs.theirs));
            format!("{} is {ours} here and {theirs} there: {}", differs.name, differs.remedy)
        });
        texts.chain(self.pages.as_ref().err().map(ToString::to_string)).collect()
    }

    fn apart_from(&self, other: &Self) -> String {
        let (one, two) = (self.digest(), other.digest());
        let found = namespace::list_differences(&self.facts, &other.facts);
        let fact = found.first().map_or("a fact", |differs| differs.name);
        format!(
            "namespaces {one} and {two} agree with the stated facts: state {fact} as well, which differs between them"
        )
    }

    /// 32 hex digits; empty for facts of the engine's own.
    pub fn digest(&self) -> &str {
        self.digest.as_deref().unwrap_or_default()
    }

    pub(crate) fn expects(&self) -> Option<String> {
        self.digest.clone()
    }

    /// The facts, by name: `weights`, `dtype`, `hash_algorithm` (the algorithm of keys), and others.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> Result<usize, EngineError> {
        Ok(self.pages()?.first().map_or(0, |page| page.tokens as usize))
    }

    /// Bytes of a block, all layers and shards.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Parts of a block, each with some of the heads: the ranks of its saving engine.
    pub fn shards(&self) -> Result<u32, EngineError> {
        let shard: u64 = self.pages()?.iter().map(|page| u64::from(page.layers) * page.page_bytes()).sum();
        Ok(u32::try_from(self.block_bytes / shard.max(1)).unwrap_or(u32::MAX))
    }

    /// The page form: each entry describes the pages of one shard for [`Page::layers`] consecutive layers.
    pub fn pages(&self) -> Result<&[Page], EngineError> {
        self.pages.as_deref().map_err(|error| EngineError::Pages(error.clone()))
    }
}
