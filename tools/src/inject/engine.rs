//! The container that runs vLLM, and its command line.

use super::document::{Edit, Node, Stream, below, item, single_quoted};

const CONNECTOR: &str = "PillionConnector";
const OPTION: &str = "--kv-transfer-config";
/// With it vLLM uses its own connector instead of the configured one.
pub(super) const OFFLOADING: &str = "--kv-offloading-size";
const MODULE: &str = "vllm.entrypoints.openai.api_server";
const SERVE: &str = "vllm serve";

/// What the container says of the connector.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Configured {
    Nothing,
    Pillion,
    /// Another connector, or this one among others.
    Foreign,
}

/// The container of an engine.
pub(super) struct Engine<'a> {
    pub(super) node: &'a Node,
    pub(super) name: &'a str,
}

/// A text of the command line: of `command` or `args`, and its number there.
struct Word<'a> {
    list: &'a Node,
    number: usize,
    node: &'a Node,
    text: &'a str,
}

// === impl Engine ===

impl<'a> Engine<'a> {
    pub(super) fn new(node: &'a Node) -> Self {
        Self { node, name: node.text_at(&["name"]).unwrap_or_default() }
    }

    /// Whether this looks like vLLM: by the last part of the image's name, or the command line. An organisation with vLLM in its
    /// name has other images, too.
    pub(super) fn runs_vllm(&self) -> bool {
        let image = self.image();
        let name = image.rsplit_once('@').map_or(image, |(name, _)| name);
        let last = name.rsplit('/').next().unwrap_or_default();
        last.contains("vllm") || {
            let words = self.words();
            program(&words).is_some() || words.iter().any(|word| runs(word.text))
        }
    }

    pub(super) fn image(&self) -> &'a str {
        self.node.text_at(&["image"]).unwrap_or_default()
    }

    /// Gives the container another image.
    pub(super) fn set_image(&self, stream: &Stream<'_>, image: &str) -> Result<Edit, String> {
        let quoted = single_quoted(image);
        match self.node.get("image") {
            Some(value) => stream.replace(value, quoted),
            None => stream.insert_entries(self.node, &format!("image: {quoted}")),
        }
    }

    fn words(&self) -> Vec<Word<'a>> {
        let lists = ["command", "args"].into_iter().filter_map(|key| self.node.get(key));
        let words = lists
            .flat_map(|list| list.items().iter().enumerate().map(move |(number, node)| (list, number, node)));
        words
            .filter_map(|(list, number, node)| Some(Word { list, number, node, text: node.text()? }))
            .collect()
    }

    /// What the command line says of a connector.
    pub(super) fn configured(&self) -> Configured {
        let words = self.words();
        let option = |word: &Word<'_>| word.text.replace('_', "-").contains(OPTION);
        if !words.iter().any(option) {
            return Configured::Nothing;
        }
        let ours = words.iter().any(|word| word.text.contains(CONNECTOR));
        let several = words.iter().any(|word| word.text.contains("MultiConnector"));
        if ours && !several { Configured::Pillion } else { Configured::Foreign }
    }

    /// Whether the command line has vLLM offload KV by itself.
    pub(super) fn offloads(&self) -> bool {
        self.words().iter().any(|word| word.text.replace('_', "-").contains(OFFLOADING))
    }

    /// Adds the connector to the command line.
    pub(super) fn configure(&self, stream: &Stream<'_>, copy: &str) -> Result<Edit, String> {
        let setting = setting(copy);
        let argument = format!("{OPTION}={setting}");
        let words = self.words();
        if let Some(word) = words.iter().find(|word| is_script(word.text)) {
            return into_script(stream, word, &setting);
        }
        if let Some(Word { list, number, .. }) = program(&words) {
            return stream.insert_text_behind(list, *number, &argument);
        }
        if self.node.get("command").is_some() {
            return Err(format!(
                "line {}: this command is not '{SERVE}' or '{MODULE}': add {OPTION} by hand, as docs/deploy.md shows",
                stream.line(self.node.start)
            ));
        }
        // The image's own entry point is vLLM.
        match self.node.get("args") {
            Some(list) if words.first().is_some_and(|word| word.text == "serve") => {
                stream.insert_text_behind(list, 0, &argument)
            }
            Some(list) => stream.insert_first_text(list, &argument),
            None => stream.insert_entries(self.node, &below("args", &item(&single_quoted(&argument)))),
        }
    }

    /// The container's `runAsUser`, `runAsGroup` and `runAsNonRoot`, of its own or of its pod.
    pub(super) fn identity(&self, pod: &'a Node) -> [Option<&'a str>; 3] {
        ["runAsUser", "runAsGroup", "runAsNonRoot"].map(|key| {
            let own = self.node.text_at(&["securityContext", key]);
            own.or_else(|| pod.text_at(&["securityContext", key]))
        })
    }
}

/// The value of the option: without blanks, so that a line of YAML takes it as it is.
fn setting(copy: &str) -> String {
    let extra = match copy {
        "" => String::new(),
        copy => format!(r#","kv_connector_extra_config":{{"pillion.copy":"{copy}"}}"#),
    };
    format!(
        r#"{{"kv_connector":"{CONNECTOR}","kv_connector_module_path":"pillion.connector","kv_role":"kv_both","kv_load_failure_policy":"recompute"{extra}}}"#
    )
}

/// The word behind which vLLM's options begin, where no shell is between.
fn program<'a, 'w>(words: &'w [Word<'a>]) -> Option<&'w Word<'a>> {
    let vllm = |text: &str| text == "vllm" || text.ends_with("/vllm");
    let served =
        words.windows(2).find(|pair| vllm(pair[0].text) && pair[1].text == "serve").map(|pair| &pair[1]);
    served.or_else(|| words.iter().find(|word| word.text == MODULE))
}

fn runs(text: &str) -> bool {
    commands(text).next().is_some()
}

/// The programs of vLLM's server that a text names as whole words, outside of a shell's comments.
fn commands(text: &str) -> impl Iterator<Item = &'static str> {
    let ends =
        |end: usize| text[end..].chars().next().is_none_or(|next| next.is_whitespace() || next == '\\');
    let is_comment = move |at: usize| {
        let line = text[..at].rsplit('\n').next().unwrap_or_default();
        line.starts_with('#') || line.contains(" #") || line.contains("\t#")
    };
    let found = move |program: &'static str| {
        let places = text.match_indices(program).map(|(at, _)| at);
        places.filter(move |at| ends(at + program.len()) && !is_comment(*at)).map(move |_| program)
    };
    [SERVE, MODULE].into_iter().flat_map(found)
}

/// Whether a word is a command line itself, for a shell.
fn is_script(text: &str) -> bool {
    runs(text) && text.trim().contains(char::is_whitespace)
}

fn into_script(stream: &Stream<'_>, word: &Word<'_>, setting: &str) -> Result<Edit, String> {
    let mut found = commands(word.text);
    let program = found.next().expect("it is a script");
    let before = word.text.split(program).next().unwrap_or_default();
    let quoted = |quote: char| before.matches(quote).count() % 2 == 1;
    if quoted('\'') || quoted('"') || found.next().is_some() || word.text.matches(program).count() != 1 {
        return Err(format!(
            "line {}: this script names '{program}' several times, or in quotes: add {OPTION} by hand, as \
             docs/deploy.md shows",
            stream.line(word.node.start)
        ));
    }
    stream.insert_into(word.node, program, &format!(" {OPTION}='{setting}'"))
}
