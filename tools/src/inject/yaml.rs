//! YAML documents as trees: read with anchors and merge keys resolved, as Kubernetes reads them, and written in block style. A scalar
//! keeps its text and its quotes, and so its type.

use std::collections::HashMap;

use saphyr_parser::{Event, Parser, ScalarStyle, Span, Tag};

/// The most nodes of one document, nodes of resolved anchors counted each time: some documents expand without end.
const NODES_MAX: usize = 1_000_000;

/// A value.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Node {
    Scalar {
        text: String,
        /// A plain scalar's type follows from its text: `true`, `7`, `null` or a string.
        plain: bool,
        /// `!!str` and the like, as written.
        tag: Option<String>,
    },
    List(Vec<Self>),
    Map(Vec<(Self, Self)>),
}

// === impl Node ===

impl Node {
    /// A string.
    pub(super) fn string(text: impl Into<String>) -> Self {
        Self::Scalar { text: text.into(), plain: false, tag: None }
    }

    /// A number, a boolean, or a string unlike both.
    pub(super) fn plain(text: impl Into<String>) -> Self {
        Self::Scalar { text: text.into(), plain: true, tag: None }
    }

    pub(super) fn map<const N: usize>(entries: [(&str, Self); N]) -> Self {
        Self::Map(entries.into_iter().map(|(key, value)| (Self::plain(key), value)).collect())
    }

    /// Returns true if another value is read as this one: in quotes or plain, the same string is the same.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Scalar { text, .. }, Self::Scalar { text: other_text, .. }) => {
                text == other_text && self.is_string() == other.is_string()
                    || self.is_null() && other.is_null()
            }
            (Self::List(items), Self::List(others)) => {
                items.len() == others.len()
                    && items.iter().zip(others).all(|(item, other)| item.is_same(other))
            }
            (Self::Map(entries), Self::Map(others)) => {
                let same = |(key, value): &(Self, Self)| {
                    others.iter().any(|(other_key, other)| key.is_same(other_key) && value.is_same(other))
                };
                entries.len() == others.len() && entries.iter().all(same)
            }
            _ => false,
        }
    }

    /// Returns true if a scalar cannot be read as a number, a boolean, a time or null.
    fn is_string(&self) -> bool {
        let Self::Scalar { text, plain, tag } = self else { return false };
        let words = ["true", "false", "yes", "no", "on", "off", "y", "n", "null", "~", "", ".nan"];
        let is_word = words.contains(&text.to_lowercase().as_str());
        let may_be_number =
            text.trim_start_matches(['+', '-', '.']).starts_with(|first: char| first.is_ascii_digit())
                || text.to_lowercase().ends_with(".inf");
        match tag.as_deref() {
            Some(tag) => tag == "!!str",
            None => !plain || !(is_word || may_be_number),
        }
    }

    /// The text of a scalar.
    pub(super) fn scalar_text(&self) -> Option<&str> {
        match self {
            Self::Scalar { text, .. } => Some(text),
            _ => None,
        }
    }

    /// Returns true if Kubernetes reads a plain scalar as `true`, by the rules of YAML 1.1.
    pub(super) fn is_true(&self) -> bool {
        matches!(self, Self::Scalar { text, plain: true, .. }
            if ["true", "yes", "on", "y"].contains(&text.to_lowercase().as_str()))
    }

    pub(super) fn is_null(&self) -> bool {
        matches!(self, Self::Scalar { text, plain: true, .. } if ["", "~", "null", "Null", "NULL"].contains(&text.as_str()))
    }

    /// The items of a list; none of anything else.
    pub(super) fn items(&self) -> &[Self] {
        match self {
            Self::List(items) => items,
            _ => &[],
        }
    }

    /// The value of a map's key.
    pub(super) fn get(&self, key: &str) -> Option<&Self> {
        let Self::Map(entries) = self else { return None };
        entries.iter().find(|(name, _)| name.scalar_text() == Some(key)).map(|(_, value)| value)
    }

    pub(super) fn get_mut(&mut self, key: &str) -> Option<&mut Self> {
        let Self::Map(entries) = self else { return None };
        entries.iter_mut().find(|(name, _)| name.scalar_text() == Some(key)).map(|(_, value)| value)
    }

    /// The value below these keys.
    pub(super) fn at(&self, path: &[&str]) -> Option<&Self> {
        path.iter().try_fold(self, |node, key| node.get(key))
    }

    /// The text below these keys.
    pub(super) fn text_at(&self, path: &[&str]) -> Option<&str> {
        self.at(path)?.scalar_text()
    }

    /// The items of the list below a key; none without a list.
    pub(super) fn items_of(&self, key: &str) -> &[Self] {
        self.get(key).map_or(&[], Self::items)
    }

    /// The item of a list of named items.
    pub(super) fn named_item(&self, list: &str, name: &str) -> Option<&Self> {
        self.items_of(list).iter().find(|item| item.text_at(&["name"]) == Some(name))
    }

    /// Gives a key of a map a value, in the key's place or behind all others.
    pub(super) fn set_entry(&mut self, key: &str, value: Self) {
        match self.get_mut(key) {
            Some(found) => *found = value,
            None => {
                if let Self::Map(entries) = self {
                    entries.push((Self::plain(key), value));
                }
            }
        }
    }

    /// Gives a key of a map a string. A string without quotes stays so if every reader takes the new one for
    /// a string, too.
    pub(super) fn set_string(&mut self, key: &str, value: &str) {
        match self.get_mut(key) {
            Some(Self::Scalar { text, plain, tag: None }) => {
                *plain &= is_word(value);
                value.clone_into(text);
            }
            _ => self.set_entry(key, Self::string(value)),
        }
    }

    /// Takes a key off a map.
    pub(super) fn take_key(&mut self, key: &str) -> Option<Self> {
        let Self::Map(entries) = self else { return None };
        let place = entries.iter().position(|(name, _)| name.scalar_text() == Some(key))?;
        Some(entries.remove(place).1)
    }
}

/// Returns true if a text needs no quotes, such as the name of an image.
fn is_word(text: &str) -> bool {
    let is_part = |character: char| character.is_ascii_alphanumeric() || "./:@_-".contains(character);
    Node::plain(text).is_string()
        && text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '/')
        && text.chars().all(is_part)
        && !text.ends_with(':')
}

/// The documents of a stream, each with its line `---`.
pub(super) fn split_documents(source: &str) -> Vec<&str> {
    let mut starts = vec![0];
    let mut offset = 0;
    for line in source.split_inclusive('\n') {
        if offset > 0
            && line.strip_prefix("---").is_some_and(|rest| rest.trim_start() != rest || rest.is_empty())
        {
            starts.push(offset);
        }
        offset += line.len();
    }
    let ends = starts.iter().copied().skip(1).chain([source.len()]);
    starts.iter().zip(ends).map(|(start, end)| &source[*start..end]).collect()
}

/// Reads one document; `None` for a text of comments and directives alone. The error names line and column.
pub(super) fn parse_document(source: &str) -> Result<Option<Node>, String> {
    if source.lines().all(|line| line.trim_start().is_empty() || line.starts_with(['#', '%'])) {
        return Ok(None);
    }
    // Kubernetes takes a closing bracket indented no further than its key; YAML 1.2, and so the parser, does not.
    read_tree(source).or_else(|error| read_tree(&brackets_joined(source)).map_err(|_| error))
}

/// The source with closing brackets on the line before their own: each character keeps its place.
fn brackets_joined(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    for line in source.split_inclusive('\n') {
        if line.trim_start().starts_with([']', '}']) && text.ends_with('\n') {
            text.pop();
            text.push(' ');
        }
        text.push_str(line);
    }
    text
}

fn read_tree(source: &str) -> Result<Option<Node>, String> {
    let mut tree = Tree::default();
    for event in Parser::new_from_str(source) {
        let (event, Span { start, .. }) = event.map_err(|error| error.to_string())?;
        tree.add_event(event).map_err(|text| format!("line {}: {text}", start.line()))?;
    }
    Ok(tree.root)
}

/// A document in the making.
#[derive(Default)]
struct Tree {
    root: Option<Node>,
    open: Vec<OpenCollection>,
    anchors: HashMap<usize, Node>,
    nodes: usize,
}

/// A collection before its end.
struct OpenCollection {
    node: Node,
    /// The key of the next value.
    key: Option<Node>,
    anchor: usize,
}

impl Tree {
    fn add_event(&mut self, event: Event<'_>) -> Result<(), String> {
        match event {
            Event::DocumentStart(_) if self.root.is_some() => Err("a second document begins".to_owned()),
            Event::Scalar(text, style, anchor, tag) => {
                let tag = tag.map(|tag| match tag.is_yaml_core_schema() {
                    true => format!("!!{}", tag.suffix),
                    false => format!("{}{}", tag.handle, tag.suffix),
                });
                let node = Node::Scalar { text: text.into_owned(), plain: style == ScalarStyle::Plain, tag };
                self.place_node(node, anchor)
            }
            Event::Alias(anchor) => {
                let node =
                    self.anchors.get(&anchor).cloned().ok_or("this alias stands within its own anchor")?;
                self.nodes += nodes(&node);
                self.place_node(node, 0)
            }
            Event::SequenceStart(anchor, tag) => {
                self.open_node(Node::List(Vec::new()), anchor, tag.as_deref())
            }
            Event::MappingStart(anchor, tag) => self.open_node(Node::Map(Vec::new()), anchor, tag.as_deref()),
            Event::SequenceEnd | Event::MappingEnd => {
                let OpenCollection { node, anchor, .. } =
                    self.open.pop().expect("the parser pairs starts and ends");
                let node = merged(node)?;
                self.place_node(node, anchor)
            }
            _ => Ok(()),
        }
    }

    fn open_node(&mut self, node: Node, anchor: usize, tag: Option<&Tag>) -> Result<(), String> {
        if let Some(tag) = tag
            && !(tag.is_yaml_core_schema() && ["map", "seq"].contains(&tag.suffix.as_str()))
        {
            return Err(format!("a list or a map has the tag {}: leave it out", tag.suffix));
        }
        self.open.push(OpenCollection { node, key: None, anchor });
        Ok(())
    }

    /// Hands a whole node to its collection.
    fn place_node(&mut self, node: Node, anchor: usize) -> Result<(), String> {
        self.nodes += 1;
        if self.nodes > NODES_MAX {
            return Err(format!(
                "this document has more than {NODES_MAX} values, those of anchors counted each time"
            ));
        }
        if anchor > 0 {
            self.anchors.insert(anchor, node.clone());
        }
        let Some(OpenCollection { node: parent, key, .. }) = self.open.last_mut() else {
            self.root = Some(node);
            return Ok(());
        };
        match (parent, key.take()) {
            (Node::Map(entries), Some(name)) => {
                let Some(text) = name.scalar_text() else {
                    return Err("a key is a list or a map: write a text".to_owned());
                };
                let known =
                    entries.iter().find(|(other, _)| other.scalar_text() == Some(text) && !is_merge(other));
                match known {
                    None => entries.push((name, node)),
                    // A chart may write a label twice.
                    Some((_, value)) if value.is_same(&node) => {}
                    Some(_) => {
                        return Err(format!("the key {text} is there twice with different values: keep one"));
                    }
                }
            }
            (Node::Map(_), None) => *key = Some(node),
            (Node::List(items), _) => items.push(node),
            (Node::Scalar { .. }, _) => unreachable!("a scalar holds nothing"),
        }
        Ok(())
    }
}

fn nodes(node: &Node) -> usize {
    1 + match node {
        Node::Scalar { .. } => 0,
        Node::List(items) => items.iter().map(nodes).sum(),
        Node::Map(entries) => entries.iter().map(|(key, value)| nodes(key) + nodes(value)).sum(),
    }
}

fn is_merge(key: &Node) -> bool {
    matches!(key, Node::Scalar { text, plain: true, .. } if text == "<<")
}

/// A map with its merge keys replaced by the entries of their maps: keys of the map itself win, then keys of earlier maps.
fn merged(node: Node) -> Result<Node, String> {
    let Node::Map(entries) = node else { return Ok(node) };
    let (merges, mut own): (Vec<_>, Vec<_>) = entries.into_iter().partition(|(key, _)| is_merge(key));
    for (_, value) in merges {
        let maps = match value {
            Node::List(maps) => maps,
            map => vec![map],
        };
        for map in maps {
            let Node::Map(brought) = map else { return Err("a merge key (<<) needs a map".to_owned()) };
            for (key, value) in brought {
                if !own.iter().any(|(known, _)| known.scalar_text() == key.scalar_text()) {
                    own.push((key, value));
                }
            }
        }
    }
    Ok(Node::Map(own))
}

/// The document in block style, without `---`.
pub(super) fn write_document(root: &Node) -> String {
    let mut text = String::new();
    block(root, 0, &mut text);
    text.trim_start_matches(['\n', ' ']).to_owned()
}

/// Writes a value behind its key or dash, with the line end.
fn block(node: &Node, indent: usize, out: &mut String) {
    match node {
        Node::Scalar { text, plain, tag } => {
            out.push(' ');
            if let Some(tag) = tag {
                out.push_str(tag);
                out.push(' ');
            }
            scalar(text, *plain, indent, out);
            out.push('\n');
        }
        Node::List(items) if items.is_empty() => out.push_str(" []\n"),
        Node::Map(entries) if entries.is_empty() => out.push_str(" {}\n"),
        Node::List(items) => {
            out.push('\n');
            for item in items {
                line(indent, "-", out);
                match item {
                    // The first entry stands on the dash's line.
                    Node::Map(entries) if !entries.is_empty() => inline(entries, indent + 2, out),
                    _ => block(item, indent + 2, out),
                }
            }
        }
        Node::Map(entries) => {
            out.push('\n');
            for entry in entries {
                line(indent, "", out);
                pair(entry, indent, out);
            }
        }
    }
}

fn line(indent: usize, text: &str, out: &mut String) {
    out.extend(std::iter::repeat_n(' ', indent));
    out.push_str(text);
}

fn inline(entries: &[(Node, Node)], indent: usize, out: &mut String) {
    for (number, entry) in entries.iter().enumerate() {
        match number {
            0 => out.push(' '),
            _ => line(indent, "", out),
        }
        pair(entry, indent, out);
    }
}

fn pair((key, value): &(Node, Node), indent: usize, out: &mut String) {
    let Node::Scalar { text, plain, .. } = key else { unreachable!("a key is a text") };
    match text.contains('\n') || text.is_empty() {
        false => scalar(text, *plain, indent, out),
        true => out.push_str(&double_quoted(text)),
    }
    out.push(':');
    block(value, indent + 2, out);
}

fn scalar(text: &str, plain: bool, indent: usize, out: &mut String) {
    if plain && !text.contains('\n') {
        out.push_str(if text.is_empty() { "null" } else { text });
    } else if text.contains('\n') && is_literal(text) {
        literal(text, indent, out);
    } else if text.chars().all(is_printable) && !text.contains('\n') {
        out.push_str(&format!("'{}'", text.replace('\'', "''")));
    } else {
        out.push_str(&double_quoted(text));
    }
}

fn is_printable(character: char) -> bool {
    !character.is_control() && !matches!(character, '\u{2028}' | '\u{2029}' | '\u{feff}')
}

/// Returns true if a text of several lines reads the same behind `|`.
fn is_literal(text: &str) -> bool {
    let printable = text.chars().all(|character| matches!(character, '\n' | '\t') || is_printable(character));
    printable
        && !text.starts_with([' ', '\n', '\t'])
        && !text.lines().any(|line| line.trim().is_empty() && !line.is_empty())
}

fn literal(text: &str, indent: usize, out: &mut String) {
    let body = text.trim_end_matches('\n');
    out.push_str(match text.len() - body.len() {
        0 => "|-",
        1 => "|",
        _ => "|+",
    });
    for line in text.strip_suffix('\n').unwrap_or(text).split('\n') {
        out.push('\n');
        if !line.is_empty() {
            out.extend(std::iter::repeat_n(' ', indent.max(2)));
            out.push_str(line);
        }
    }
}

/// A text with escapes, as JSON has them.
fn double_quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for character in text.chars() {
        match character {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\t' => quoted.push_str("\\t"),
            character if is_printable(character) => quoted.push(character),
            character => quoted.push_str(&format!("\\u{:04x}", u32::from(character))),
        }
    }
    quoted.push('"');
    quoted
}
