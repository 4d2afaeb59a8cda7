//! The URLs of engines, as a file lists them.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use toml::Spanned;

use super::address::EngineUrl;

/// The most bytes of a file: some 1,500 engines.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// The form of a file, at the end of every error.
const FORM: &str =
    r#"the file has two lists, prefill = ["http://HOST:PORT"] and decode = ["http://HOST:PORT"]"#;

/// The URLs of all engines.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct EngineList {
    pub(super) prefill: Vec<EngineUrl>,
    pub(super) decode: Vec<EngineUrl>,
}

/// The texts of a file, with their places.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EngineFile {
    prefill: Spanned<Vec<Spanned<String>>>,
    decode: Spanned<Vec<Spanned<String>>>,
}

/// The URLs of one role, one at least; or an error and its place.
fn parse_urls(list: Spanned<Vec<Spanned<String>>>) -> Result<Vec<EngineUrl>, (usize, String)> {
    if list.get_ref().is_empty() {
        return Err((list.span().start, "the list is empty; name an engine".into()));
    }
    let parse = |text: Spanned<String>| text.get_ref().parse().map_err(|error| (text.span().start, error));
    list.into_inner().into_iter().map(parse).collect()
}

// === impl EngineList ===

impl EngineList {
    /// The same list. Fails if an engine has https, and no authority is there to check its certificate.
    pub(super) fn checkable(self, has_authorities: bool) -> Result<Self, String> {
        match self.prefill.iter().chain(&self.decode).find(|url| url.is_https()) {
            Some(url) if !has_authorities => {
                Err(format!("{url} needs --engine-ca: name a PEM file with the authority of its certificate"))
            }
            _ => Ok(self),
        }
    }

    /// Adds the engines of another list that neither role has.
    pub(super) fn add_missing(&mut self, others: Self) {
        let known: Vec<EngineUrl> = self.prefill.iter().chain(&self.decode).cloned().collect();
        let missing =
            |urls: Vec<EngineUrl>| urls.into_iter().filter(|url| !known.contains(url)).collect::<Vec<_>>();
        self.prefill.extend(missing(others.prefill));
        self.decode.extend(missing(others.decode));
    }

    /// The URLs of a TOML file. An error names the line, and the form to write there.
    pub(super) fn read_file(path: &Path) -> Result<Self, String> {
        let unreadable = |error| {
            format!("cannot read {}: {error}; name a file of at most 64 KiB in --engines", path.display())
        };
        let mut text = String::new();
        let file = File::open(path).map_err(unreadable)?;
        let bytes = file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(unreadable)?;
        if bytes as u64 > FILE_BYTES_MAX {
            return Err(unreadable(std::io::ErrorKind::FileTooLarge.into()));
        }
        Self::parse_lists(&text).map_err(|(place, error)| {
            let line = 1 + text.bytes().take(place).filter(|byte| *byte == b'\n').count();
            format!("{}, line {line}: {error}; {FORM}", path.display())
        })
    }

    fn parse_lists(text: &str) -> Result<Self, (usize, String)> {
        let place =
            |error: toml::de::Error| (error.span().map_or(0, |span| span.start), error.message().to_owned());
        let EngineFile { prefill, decode } = toml::from_str(text).map_err(place)?;
        Ok(Self { prefill: parse_urls(prefill)?, decode: parse_urls(decode)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<EngineList, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        EngineList::read_file(file.path())
    }

    #[test]
    fn a_file_names_engines_of_both_roles() {
        let read = read(
            "# both\nprefill = [\"http://p:1\"]\ndecode = [\n  \"http://d:1\",\n  \"http://10.0.0.1:2\",\n]\n",
        );
        let urls = |urls: &[&str]| urls.iter().map(|url| url.parse().unwrap()).collect();
        assert_eq!(
            read,
            Ok(EngineList {
                prefill: urls(&["http://p:1"]),
                decode: urls(&["http://d:1", "http://10.0.0.1:2"])
            })
        );
    }

    #[test]
    fn an_error_names_the_line_and_the_remedy() {
        let prefill = "prefill = [\"http://p:1\"]\n";
        for (text, line, why) in [
            (
                "decode = [\n  \"http://d:1\",\n  \"d:1\",\n]\n",
                4,
                "\"d:1\" is no engine's address; write http",
            ),
            ("decode = []\n", 2, "the list is empty; name an engine"),
            ("decode = 7\n", 2, "invalid type"),
            ("decode = [\"http://d:1\"]\ndecoder = []\n", 3, "unknown field `decoder`"),
            ("decode = [\n", 2, ""),
            ("", 1, "missing field `decode`"),
        ] {
            let error = read(&format!("{prefill}{text}")).unwrap_err();
            assert!(error.contains(&format!(", line {line}: ")) && error.contains(why), "{text}{error}");
            assert!(error.ends_with(FORM) && !error.contains('\n'), "{error}");
        }
        let long = read(&"#".repeat(FILE_BYTES_MAX as usize + 1)).unwrap_err();
        assert!(long.contains("64 KiB"), "{long}");
        let missing = EngineList::read_file(Path::new("/no/such/file")).unwrap_err();
        assert!(missing.contains("/no/such/file") && missing.contains("--engines"), "{missing}");
    }
}
