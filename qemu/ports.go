package qemu

import (
	"fmt"
	"hash/fnv"
	"net"
)

// Ports are below those that Linux uses for outgoing connections (32768 and up,
// ip_local_port_range). Otherwise such a connection could have a cluster's port when the
// cluster starts again.
const (
	firstPort = 20000
	lastPort  = 29999
)

// freePorts returns ports of the loopback for a new cluster that are free and in no other
// cluster's plan. The search starts at a port that depends on the name, so that a cluster
// that is made again mostly gets the same ports.
func freePorts(name string, want int) ([]int, error) {
	clusters, _ := List() // one that is damaged won't be brought up again
	planned := map[int]bool{}
	for _, c := range clusters {
		planned[c.KubernetesPort] = true
		for _, n := range c.Nodes {
			planned[n.APIPort] = true
		}
	}
	h := fnv.New32a()
	h.Write([]byte(name))
	const count = lastPort - firstPort + 1
	var free []int
	for i := range count {
		port := firstPort + (int(h.Sum32()%count)+i)%count
		if planned[port] {
			continue
		}
		l, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		l.Close()
		if free = append(free, port); len(free) == want {
			return free, nil
		}
	}
	return nil, fmt.Errorf("no %d free ports between %d and %d on 127.0.0.1", want, firstPort, lastPort)
}
