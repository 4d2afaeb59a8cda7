//! Pairs of NICs, one of each side. Pure, with the same result on both sides.

/// For each NIC of the reading side, a NIC of the serving side. NICs of the same NUMA node are paired as far
/// as both nodes are known, the rest in order. Both sides have the same number.
pub(super) fn pair(asking: &[Option<u16>], serving: &[Option<u16>]) -> Vec<usize> {
    let mut taken = vec![false; serving.len()];
    let mut pairs: Vec<Option<usize>> = asking
        .iter()
        .map(|node| {
            let same = |at: &usize| !taken[*at] && node.is_some() && serving[*at] == *node;
            let at = (0..serving.len()).find(same)?;
            taken[at] = true;
            Some(at)
        })
        .collect();
    let mut rest = (0..serving.len()).filter(|at| !taken[*at]);
    pairs.iter_mut().filter(|pair| pair.is_none()).for_each(|pair| *pair = rest.next());
    pairs.into_iter().map(|pair| pair.expect("both sides have as many")).collect()
}

#[cfg(test)]
mod tests {
    use super::pair;

    #[test]
    fn nodes_go_together_and_the_rest_in_order() {
        let none = None;
        assert_eq!(pair(&[none, none, none], &[none, none, none]), [0, 1, 2]);
        assert_eq!(pair(&[Some(0), Some(1)], &[Some(1), Some(0)]), [1, 0]);
        assert_eq!(pair(&[Some(0), Some(0), Some(1)], &[Some(1), Some(0), Some(0)]), [1, 2, 0]);
        // More of one node than on the other side, and unknown ones.
        assert_eq!(pair(&[Some(0), Some(0), Some(0)], &[Some(1), Some(0), Some(1)]), [1, 0, 2]);
        assert_eq!(pair(&[none, Some(3), Some(2)], &[Some(2), none, Some(3)]), [1, 2, 0]);
    }

    #[test]
    fn every_nic_has_one_of_its_own() {
        for seed in 0..4096_u32 {
            let node = |at: u32| (seed >> (2 * at) & 3).checked_sub(1).map(|node| node as u16);
            let (asking, serving) = ([node(0), node(1), node(2)], [node(3), node(4), node(5)]);
            let mut pairs = pair(&asking, &serving);
            pairs.sort_unstable();
            assert_eq!(pairs, [0, 1, 2]);
        }
    }
}
