//! The largest difference between the forecast for rooms of other sizes and their real hits.

use tiers::forecast::{Forecast, ROOMS};

use crate::caches::{Request, Tier};
use crate::replayed::share;

/// Sizes of the finite rooms as multiples of the forecasting one, in the order of [`ROOMS`].
const MULTIPLES: [f64; ROOMS.len() - 1] = [0.5, 1.0, 2.0, 4.0];
/// Number of replayed requests of `turns`.
pub(crate) const TURNS: usize = 10_000;
/// Blocks represented by one block of the miniatures.
const STRIDES: [usize; 3] = [1, 4, 8];

/// Cells of JSON for a trace called `name`, by room: the forecast of each by each stride, and the real share.
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

/// Returns the forecast share of each of [`ROOMS`], the first quarter of the requests not counted.
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
