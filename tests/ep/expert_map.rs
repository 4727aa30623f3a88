use super::ranks::Dice;
use warploom::Tensor;
use warploom::ep::ExpertMap;
use warploom::ep::eplb::{Cluster, Loads, rebalance_experts};
use warploom_tests::on_every_device;

#[test]
fn replicas_take_turns() {
    on_every_device(|d, s| {
        let loads = Loads::from_rows(&[[90, 132, 40, 61, 104, 165, 39, 4], [1, 2, 3, 4, 5, 6, 7, 80]]).unwrap();
        let cluster = Cluster::new(12, 4);
        let placement = rebalance_experts(&loads, &cluster).unwrap();
        for layer in 0..2 {
            let map = ExpertMap::new(d, &placement, layer).unwrap();
            let mut ids = Dice(3).experts(100, 3, 8);
            ids[5] = 8;
            ids[7] = i32::MAX;
            let dids = Tensor::from_slice(d, &ids, &[100, 3]).unwrap();
            let mut out = Tensor::uninit(d, &[100, 3]).unwrap();
            for turn in [0, 1, u32::MAX] {
                map.apply(s, &mut out, &dids, turn).unwrap();
                for (i, (&id, &got)) in ids.iter().zip(&out.to_vec().unwrap()).enumerate() {
                    let want = if id < 0 {
                        id
                    } else if id >= 8 {
                        i32::MAX
                    } else {
                        let replicas = placement.replicas(layer, id as usize);
                        let n = placement.logcnt(layer)[id as usize];
                        replicas[(i as u32 / 3).wrapping_add(turn) as usize % n] as i32
                    };
                    assert_eq!(got, want, "pair {i}, expert {id}");
                }
            }
        }
        assert!(ExpertMap::new(d, &placement, 2).is_err());
    });
}
