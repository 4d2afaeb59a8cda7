//! What is foretold of rooms of other sizes, beside what they find: the largest difference.

use tiers::forecast::{Forecast, ROOMS};

use crate::caches::{Request, Tier};
use crate::replayed::share;

/// What the rooms are as multiples of the one that foretells, as far as they have an end; in the order of [`ROOMS`].
const MULTIPLES: [f64; ROOMS.len() - 1] = [0.5, 1.0, 2.0, 4.0];
/// Requests of `turns` that are played.
pub(crate) const TURNS: usize = 10_000;
/// Blocks for which one stands in the miniatures.
const STRIDES: [usize; 3] = [1, 4, 8];

/// Rooms of a trace, which is called `name`: what each is foretold to find, by each stride, and what it finds.
pub(crate) fn of_trace(name: &str, rooms: &[usize], requests: &[Request]) -> Vec<String> {
    let mut cells = Vec::new();
    for &room in rooms {
        let real = MULTIPLES.map(|times| {
            let blocks = ((room as f64 * times) as usize).next_multiple_of(5);
            share(&mut Tier::new(blocks), requests, 0)
        });
        for stride in STRIDES {
            let foretold = foretell(room, stride, requests);
            let worst = real.iter().zip(foretold).map(|(real, told)| (real - told).abs()).fold(0.0, f64::max);
            println!("{name}_{room} by {stride}: {foretold:.4?}, real {real:.4?}, worst {worst:.4}");
            cells.push(format!("\"{name}_{room}_by_{stride}\":{worst:.4}"));
        }
    }
    cells
}

/// What each of [`ROOMS`] is foretold to find, the first quarter of the requests not counted.
fn foretell(room: usize, stride: usize, requests: &[Request]) -> [f64; ROOMS.len()] {
    let mut forecast = Forecast::new(room as u64, room.div_ceil(stride) as u64);
    let mut before = (0, [0; ROOMS.len()]);
    for (at, Request { chain, ending }) in requests.iter().enumerate() {
        if at == requests.len() / 4 {
            before = (forecast.asked(), forecast.found());
        }
        forecast.request(0, chain, 0..chain.len(), *ending);
    }
    let asked = (forecast.asked() - before.0) as f64;
    std::array::from_fn(|room| (forecast.found()[room] - before.1[room]) as f64 / asked)
}
