//! Keys for Python, by `shm_protocol::key`: `none_hash`, the growing `Chain`, and `derive`.

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyTuple};
use shm_protocol::key::{
    self, Algorithm, BlockHash, Derivation, ExtraForm, ExtraKey, KeyError, NoneHashRule,
};

use super::bytes16;
use crate::error::{ShimError as Failure, refuse_argument};

/// The extra keys of each block, as Python has them.
type Extra = Option<Vec<Option<Vec<PyExtraKey>>>>;

/// An extra key as vLLM has it, tagged or bare.
#[derive(Debug)]
pub(super) struct PyExtraKey(ExtraKey);

/// The parts of an extra key.
#[derive(FromPyObject)]
enum PyAtom {
    Text(String),
    Integer(i64),
    Bytes(Vec<u8>),
}

/// One request's block hashes, growing with its tokens.
#[derive(Debug)]
#[pyclass(name = "Chain", module = "pillion._shim")]
pub(super) struct PyChain {
    chain: key::Chain,
    algorithm: Algorithm,
}

#[pymethods]
impl PyChain {
    #[new]
    #[pyo3(signature = (algo, none_hash, block_size, form, before = None))]
    fn new(
        algo: &str,
        none_hash: &[u8],
        block_size: u32,
        form: &str,
        before: Option<&[u8]>,
    ) -> PyResult<Self> {
        let algorithm = Algorithm::of_fact(algo).map_err(Failure::from)?;
        let mut chain = key::Chain::new(algorithm, none_hash, block_size).map_err(Failure::from)?;
        if let Some(before) = before {
            chain = chain.behind(BlockHash::from_slice(before).map_err(Failure::from)?);
        }
        Ok(Self { chain: chain.with_form(parse_name(form)?), algorithm })
    }

    fn append(&mut self, py: Python<'_>, token_ids: Vec<u64>, extra_keys: Extra) -> PyResult<()> {
        let extra = unwrapped(extra_keys).unwrap_or_default();
        let extra: Vec<Vec<ExtraKey>> = extra.into_iter().map(Option::unwrap_or_default).collect();
        py.detach(|| self.chain.append_with(&token_ids, &extra)).map_err(|error| Failure::from(error).into())
    }

    /// vLLM's hashes.
    fn hashes<'py>(&self, py: Python<'py>, start: usize) -> Vec<Bound<'py, PyBytes>> {
        let keys = self.chain.hashes().get(start..).unwrap_or_default();
        keys.iter().map(|key| PyBytes::new(py, self.algorithm.vllm_hash(key))).collect()
    }

    fn keys<'py>(&self, py: Python<'py>, start: usize) -> Vec<Bound<'py, PyBytes>> {
        bytes_of(py, self.chain.hashes().get(start..).unwrap_or_default())
    }

    fn tail<'py>(
        &self,
        py: Python<'py>,
        extra_keys: Option<Vec<PyExtraKey>>,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let extra: Vec<ExtraKey> = extra_keys.unwrap_or_default().into_iter().map(|key| key.0).collect();
        let tail = self.chain.tail_with(&extra).map_err(Failure::from)?;
        Ok(tail.map(|key| PyBytes::new(py, &key.0)))
    }

    fn __len__(&self) -> usize {
        self.chain.hashes().len()
    }
}

/// Returns the keys of blocks behind one with the key `before`, from vLLM's hashes of 16 bytes.
#[pyfunction]
pub(super) fn extend_hashes<'py>(
    py: Python<'py>,
    before: Option<&[u8]>,
    hashes: Vec<PyBackedBytes>,
    token_ids: Vec<u64>,
    extra_keys: Extra,
    form: &str,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let hash = |bytes: &[u8]| BlockHash::from_slice(bytes).map_err(Failure::from);
    let before = before.map(hash).transpose()?;
    let hashes = hashes.iter().map(|bytes| hash(bytes)).collect::<Result<Vec<_>, _>>()?;
    let (extra, form) = (unwrapped(extra_keys).unwrap_or_default(), parse_name(form)?);
    let extra: Vec<Vec<ExtraKey>> = extra.into_iter().map(Option::unwrap_or_default).collect();
    let keys = py.detach(|| key::extend_hashes(before.as_ref(), &hashes, &token_ids, &extra, form));
    Ok(bytes_of(py, &keys.map_err(Failure::from)?))
}

fn bytes_of<'py>(py: Python<'py>, keys: &[BlockHash]) -> Vec<Bound<'py, PyBytes>> {
    keys.iter().map(|key| PyBytes::new(py, &key.0)).collect()
}

/// The parent of a first block.
#[pyfunction]
pub(super) fn none_hash<'py>(
    py: Python<'py>,
    algo: &str,
    seed: Option<&str>,
    rule: &str,
) -> PyResult<Bound<'py, PyBytes>> {
    let algorithm: Algorithm = parse_name(algo)?;
    let hash: BlockHash = key::none_hash(algorithm, parse_name(rule)?, seed).map_err(Failure::from)?;
    Ok(PyBytes::new(py, algorithm.vllm_hash(&hash)))
}

/// Returns the key of a block with this hash in a log with this fold.
#[pyfunction]
#[pyo3(name = "folded")]
pub(super) fn fold_hash<'py>(py: Python<'py>, hash: &[u8], fold: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    let hash = BlockHash::from_slice(hash).map_err(Failure::from)?;
    Ok(PyBytes::new(py, &hash.folded(&bytes16("a fold", fold)?).0))
}

/// All keys of one request: the first hash, the keys of its full blocks, that of the tail.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "the fields of `pillion keys`, named at the call")]
pub(super) fn derive_keys<'py>(
    py: Python<'py>,
    algo: &str,
    seed: Option<String>,
    rule: &str,
    form: &str,
    block_size: u32,
    token_ids: Vec<u64>,
    extra_keys: Extra,
    group: u32,
    hash_block_size: Option<u32>,
) -> PyResult<Bound<'py, PyTuple>> {
    let (algo, rule, form) =
        (parse_name(algo)?, parse_name::<NoneHashRule>(rule)?, parse_name::<ExtraForm>(form)?);
    let extra_keys = unwrapped(extra_keys);
    let derivation =
        Derivation { algo, seed, rule, form, block_size, token_ids, extra_keys, group, hash_block_size };
    let derived = py.detach(|| derivation.derive()).map_err(Failure::from)?;
    let hashes: Vec<_> = derived.hashes.iter().map(|hash| PyBytes::new(py, hash)).collect();
    let tail = derived.tail.map(|hash| PyBytes::new(py, &hash));
    (PyBytes::new(py, &derived.none_hash), hashes, tail).into_pyobject(py)
}

fn parse_name<T: std::str::FromStr<Err = KeyError>>(name: &str) -> Result<T, Failure> {
    Ok(name.parse()?)
}

fn unwrapped(extra: Extra) -> Option<Vec<Option<Vec<ExtraKey>>>> {
    let keys = |keys: Option<Vec<PyExtraKey>>| keys.map(|keys| keys.into_iter().map(|key| key.0).collect());
    extra.map(|blocks| blocks.into_iter().map(keys).collect())
}

// === impl PyExtraKey ===

impl<'py> FromPyObject<'_, 'py> for PyExtraKey {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let atoms = match object.extract::<PyAtom>() {
            Ok(atom) => vec![atom],
            Err(_) => object.extract::<Vec<PyAtom>>()?,
        };
        Ok(Self(extra_key(atoms)?))
    }
}

fn extra_key(atoms: Vec<PyAtom>) -> Result<ExtraKey, Failure> {
    let texts: Vec<Option<&str>> = atoms.iter().map(PyAtom::as_text).collect();
    Ok(match (&texts[..], &atoms[..]) {
        ([Some(text)], _) => ExtraKey::Text((*text).to_owned()),
        ([Some("lora"), Some(name), Some(path)], _) => {
            ExtraKey::Lora { name: (*name).to_owned(), path: (*path).to_owned() }
        }
        ([Some("cache_salt"), Some(salt)], _) => ExtraKey::CacheSalt((*salt).to_owned()),
        ([Some("mm"), Some(identifier), None] | [Some(identifier), None], [.., PyAtom::Integer(offset)]) => {
            ExtraKey::Multimodal { identifier: (*identifier).to_owned(), offset: *offset }
        }
        ([Some("prompt_embeds"), None] | [None], [.., PyAtom::Bytes(digest)]) => {
            ExtraKey::PromptEmbeds(digest.clone())
        }
        _ => {
            return refuse_argument(
                "an extra key has an unknown form: pass (\"lora\", name, path), (\"mm\", identifier, offset), \
                 (\"cache_salt\", salt), (\"prompt_embeds\", bytes), or the same without the first word in the bare \
                 form",
            );
        }
    })
}

// === impl PyAtom ===

impl PyAtom {
    fn as_text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }
}
