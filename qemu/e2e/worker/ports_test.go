//go:build e2e

package worker

import (
	"encoding/json"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// portsPage lists the ports in two tables: those on all addresses, and those on loopback.
const portsPage = "../../../docs/ports.md"

// row is a row of one of these tables.
type row struct {
	port, protocol, program, nodes string
	loopback                       bool
}

// anyPort is the entry of a program whose port the kernel chooses.
const anyPort = "any free port"

// documented reads the tables of the page. NodePorts and WireGuard's are left
// out: the cluster has none.
func documented(t *testing.T) (rows []row) {
	t.Helper()
	page, err := os.ReadFile(portsPage)
	if err != nil {
		t.Fatal(err)
	}
	heading := ""
	for line := range strings.Lines(string(page)) {
		if h, ok := strings.CutPrefix(line, "## "); ok {
			heading = strings.TrimSpace(h)
		}
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		if strings.Trim(cells[0], "0123456789") != "" && cells[0] != anyPort || cells[0] == "" {
			continue
		}
		switch heading {
		case "Listening on all addresses of a node":
			rows = append(rows, row{port: cells[0], protocol: strings.ToLower(cells[1][:3]), program: cells[2], nodes: cells[3]})
		case "Listening on loopback only":
			r := row{port: cells[0], protocol: "tcp", program: cells[1], loopback: true}
			if strings.Contains(r.program, "UDP and TCP") {
				r.protocol = ""
			}
			rows = append(rows, r)
		}
	}
	if len(rows) < 10 {
		t.Fatalf("%s has %d ports", portsPage, len(rows))
	}
	return rows
}

// S-098: docs/ports.md lists all ports on which a node listens, and a node
// listens on each port of its tables.
func ports(t *testing.T, c *e2etest.Cluster, control, worker qemu.Node) {
	rows := documented(t)
	found := map[string]bool{}
	for _, n := range []qemu.Node{control, worker} {
		var all struct {
			Sockets []struct{ Protocol, Local, State, Command string }
		}
		out := c.Gbctl("-n", n.Address.String(), "netstat", "-l", "-o", "json")
		if err := json.Unmarshal([]byte(out), &all); err != nil {
			t.Fatalf("%v in\n%s", err, out)
		}
		for _, s := range all.Sockets {
			at, err := netip.ParseAddrPort(s.Local)
			if err != nil {
				continue // a Unix socket
			}
			port := s.Local[strings.LastIndex(s.Local, ":")+1:]
			i := slices.IndexFunc(rows, func(r row) bool {
				return (r.port == port || r.port == anyPort && strings.HasPrefix(r.program, s.Command+":")) && strings.HasPrefix(s.Protocol, r.protocol) && (!r.loopback || at.Addr().IsLoopback() || at.Addr().IsLinkLocalUnicast()) &&
					(n == control || r.nodes != "control planes")
			})
			if i < 0 {
				t.Errorf("%s listens on %s %s (%s), which %s doesn't list", n.Name, s.Protocol, s.Local, s.Command, portsPage)
				continue
			}
			found[rows[i].port] = true
		}
	}
	for _, r := range rows {
		if !found[r.port] {
			t.Errorf("nothing listens on %s %s (%s)", r.protocol, r.port, r.program)
		}
	}
}
