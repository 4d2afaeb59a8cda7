//! `pillion top`: the tables of [`sidecar::pages::overview`] on a terminal, read from a sidecar's `/metrics`
//! at each interval.

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Block, Paragraph, Row, Table, Wrap};

use crate::ctl::{ControlTarget, CtlError, send_request};
use sidecar::config::{HTTP_DEFAULT, IpPort, Time};
use sidecar::pages::overview::{Overview, Samples, Section};
use sidecar::system::clock;

/// A cell's width: of names, and of figures.
const NAME_WIDTH: u16 = 24;
const FIGURE_WIDTH: u16 = 16;
/// Time between two pictures.
const PICTURE: Duration = Duration::from_millis(100);

/// Options of `pillion top`.
#[derive(Args, Clone, Debug)]
pub struct TopOptions {
    /// Address of the sidecar's pages, its --http
    #[arg(long, env = "PILLION_HTTP", default_value_t = HTTP_DEFAULT, value_name = "IP:PORT")]
    pub http: IpPort,
    /// Time between two updates
    #[arg(long, default_value = "1s", value_name = "TIME")]
    pub every: Time,
    /// Print the tables once, with averages since the start, and end; the default if the output is not a terminal
    #[arg(long)]
    pub once: bool,
}

/// The samples of one reading, and its time.
struct Look {
    at: Instant,
    samples: Samples,
}

/// Shows the tables until a key ends the program, or prints them once.
pub fn show_tables(options: &TopOptions, print: impl FnOnce(&str)) -> anyhow::Result<()> {
    let first = scrape_sidecar(options.http.0)?;
    if options.once || !std::io::stdout().is_terminal() {
        print(&table_text(&Overview::new(&first.samples, None, clock::since_1970())));
        return Ok(());
    }
    let looks = look_every(options.http.0, Duration::from_millis(options.every.as_millis().max(100)));
    ratatui::run(|terminal| {
        let (mut before, mut latest) = (None::<Look>, Ok(first));
        loop {
            if let Ok(look) = looks.try_recv()
                && let Ok(seen) = std::mem::replace(&mut latest, look)
            {
                before = Some(seen);
            }
            let shown = latest.as_ref().map(|now| {
                let ago = before.as_ref().map(|before| (&before.samples, now.at - before.at));
                Overview::new(&now.samples, ago, clock::since_1970())
            });
            terminal.draw(|frame| draw(frame, &shown)).context("cannot draw")?;
            if has_seen_enough().context("cannot read the terminal")? {
                return Ok(());
            }
        }
    })
}

/// Reads again and again, on a thread of its own: keys work while a sidecar does not answer.
fn look_every(http: SocketAddr, every: Duration) -> mpsc::Receiver<Result<Look, CtlError>> {
    let (sender, looks) = mpsc::sync_channel(1);
    thread::spawn(move || {
        loop {
            thread::sleep(every);
            if sender.send(scrape_sidecar(http)).is_err() {
                return;
            }
        }
    });
    looks
}

#[expect(clippy::disallowed_methods, reason = "a client reads the clock")]
fn now() -> Instant {
    Instant::now()
}

fn scrape_sidecar(http: SocketAddr) -> Result<Look, CtlError> {
    let page = send_request(&ControlTarget::Pages(http), "GET", "/metrics", "")?;
    Ok(Look { at: now(), samples: Samples::parse_text(&page) })
}

/// Waits until the next picture. Returns true if the user ends the program.
fn has_seen_enough() -> std::io::Result<bool> {
    let until = now() + PICTURE;
    while event::poll(until.saturating_duration_since(now()))? {
        if let Event::Key(key) = event::read()? {
            let interrupted = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
            if interrupted || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

fn draw(frame: &mut Frame<'_>, shown: &Result<Overview, &CtlError>) {
    let overview = match shown {
        Ok(overview) => overview,
        Err(error) => {
            frame.render_widget(
                Paragraph::new(error.to_string()).fg(Color::Red).wrap(Wrap { trim: true }),
                frame.area(),
            );
            return;
        }
    };
    let alarms: Vec<Line<'_>> =
        overview.alarms.iter().map(|alarm| Line::from(alarm.as_str()).fg(Color::Red)).collect();
    let heights = overview.sections.iter().map(|section| Constraint::Length(section.rows.len() as u16 + 2));
    let above = [Constraint::Length(1), Constraint::Length(alarms.len() as u16)];
    let areas = Layout::vertical(above.into_iter().chain(heights)).split(frame.area());
    frame.render_widget(Line::from(overview.heading.as_str()).bold(), areas[0]);
    frame.render_widget(Paragraph::new(alarms), areas[1]);
    for (section, area) in overview.sections.iter().zip(&areas[2..]) {
        frame.render_widget(table(section), *area);
    }
}

fn table(section: &Section) -> Table<'_> {
    let widths = (0..section.columns.len())
        .map(|at| Constraint::Length(if at == 0 { NAME_WIDTH } else { FIGURE_WIDTH }));
    let rows = section.rows.iter().map(|row| Row::new(row.iter().map(String::as_str)));
    let heads = Row::new(section.columns.iter().copied()).dim();
    let title = Block::new().title(Line::from(section.title).bold().fg(Color::Cyan));
    Table::new(rows, widths).header(heads).block(title)
}

/// The tables as lines, for a file or another program.
fn table_text(overview: &Overview) -> String {
    let mut lines = vec![overview.heading.clone()];
    lines.extend(overview.alarms.iter().map(|alarm| format!("! {alarm}")));
    for section in &overview.sections {
        let heads = section.columns.iter().map(|column| (*column).to_owned()).collect();
        lines.extend([String::new(), section.title.to_owned()]);
        for row in [heads].iter().chain(&section.rows) {
            let cells = row.iter().enumerate().map(|(at, cell)| {
                let width = usize::from(if at == 0 { NAME_WIDTH } else { FIGURE_WIDTH });
                format!("{cell:<width$}")
            });
            lines.push(cells.collect::<Vec<_>>().join(" ").trim_end().to_owned());
        }
    }
    lines.join("\n") + "\n"
}
