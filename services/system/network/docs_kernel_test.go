//go:build kernel

package network

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// example is one of docs/networking.md: a title, a configuration, and lines about what is there then.
var example = regexp.MustCompile("(?s)\n### (\\d+\\. [^\n]+)\n.*?```yaml\n(.*?)```\n\n```text\n(.*?)```")

// Each example of docs/networking.md does what the page says: on two cards with a DHCP server and a router each.
func TestExamplesOfThePage(t *testing.T) {
	page, err := os.ReadFile("../../../docs/networking.md")
	if err != nil {
		t.Fatal(err)
	}
	all := example.FindAllStringSubmatch(string(page), -1)
	if len(all) < 10 {
		t.Fatalf("%d examples", len(all))
	}
	for _, e := range all {
		t.Run(e[1], func(t *testing.T) {
			var document struct {
				Machine struct {
					Network config.Network `yaml:"network"`
				} `yaml:"machine"`
			}
			if err := yaml.Unmarshal([]byte(e[2]), &document); err != nil {
				t.Fatal(err)
			}
			p := newPeer(t)
			for i := range 2 {
				name, far := fmt.Sprintf("eth%d", i), fmt.Sprintf("far%d", i)
				p.wire(name, far, fmt.Sprintf("10.5.%d.1/24", i))
				l, err := netlink.LinkByName(name)
				if err == nil {
					err = netlink.LinkSetHardwareAddr(l, net.HardwareAddr{2, 5, 0, 0, 0, byte(i)})
				}
				if err == nil {
					p.do(func() {
						var l netlink.Link
						if l, err = netlink.LinkByName(far); err == nil {
							err = netlink.LinkSetMTU(l, 9000)
						}
					})
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			p.dnsmasq("--interface=far0", "--interface=far1", "--dhcp-range=10.5.0.50,10.5.0.50,1h", "--dhcp-range=10.5.1.50,10.5.1.50,1h")
			n := startNode(t, document.Machine.Network)
			n.up(time.Minute)
			for line := range strings.Lines(e[3]) {
				n.shows(strings.Fields(line))
			}
		})
	}
}

// shows waits until the node has what a line of the page says.
func (n *node) shows(line []string) {
	n.t.Helper()
	what, rest := line[0], strings.Join(line[1:], " ")
	eventually.That(n.t, 15*time.Second, strings.Join(line, " "), func() error {
		var text string
		switch what {
		case "address":
			text, rest = ip(n.t, "address", "show", "dev", line[1]), line[2]
		case "link":
			text, rest = ip(n.t, "link", "show", "dev", line[1]), strings.Join(line[2:], " ")
		case "detail":
			text, rest = ip(n.t, "-d", "link", "show", "dev", line[1]), strings.Join(line[2:], " ")
		case "route":
			text = ip(n.t, "route", "show", "table", "all")
			text = regexp.MustCompile(` (proto|scope) \S+| onlink| linkdown`).ReplaceAllString(text, "")
		case "rule":
			text = regexp.MustCompile(`\t| proto \S+`).ReplaceAllString(ip(n.t, "rule"), " ")
			text = strings.Join(strings.Fields(text), " ")
		case "file":
			data, err := os.ReadFile(filepath.Join(n.etc, line[1]))
			if err != nil {
				return err
			}
			text, rest = string(data), strings.Join(line[2:], " ")
		default:
			n.t.Fatalf("the page says %q", line)
		}
		if !strings.Contains(text, rest) {
			return fmt.Errorf("there is\n%s", text)
		}
		return nil
	})
}
