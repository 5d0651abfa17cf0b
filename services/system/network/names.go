package network

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/garboard-os/garboard/boot/untrusted"
	"golang.org/x/sys/unix"
)

const (
	// maxNameservers is the number that resolvers read (MAXNS in resolv.conf(5)).
	maxNameservers = 3
	// maxHostname is the kernel's limit (sethostname(2)); Kubernetes allows node
	// names of 253, so this one is the limit.
	maxHostname = 63
)

// hostnameSyntax is a DNS name in lower case (RFC 1123 §2.1), as Kubernetes
// demands for names of nodes.
var hostnameSyntax = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)

// cleanHostname is name as the name of a node, or "" if it isn't valid.
func cleanHostname(name string) string {
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	if len(name) > maxHostname || !hostnameSyntax.MatchString(name) {
		return ""
	}
	return name
}

// hostnameFromMAC is the name of a node without a configured one: the same at each boot.
func hostnameFromMAC(mac net.HardwareAddr) string {
	return fmt.Sprintf("garboard-%x", []byte(mac))
}

// files keeps the files under /etc that other programs read. It records their
// content, so that an unchanged file isn't written again.
type files struct {
	dir     string
	written map[string]string
}

func (f *files) write(name, content string) error {
	if f.written[name] == content {
		return nil
	}
	if err := replace(filepath.Join(f.dir, name), content); err != nil {
		return err
	}
	if f.written == nil {
		f.written = map[string]string{}
	}
	f.written[name] = content
	return nil
}

// replace changes a file in place: the kubelet's container has the file itself mounted,
// and would keep the old one after a rename. For a short time the end of a longer old
// content follows the new one; after a power cut /etc is made again in any case.
func replace(path, content string) error {
	f, err := untrusted.OpenFile(path, os.O_WRONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return untrusted.WriteFile(path, []byte(content), 0o644)
	}
	if err != nil {
		return err
	}
	if _, err = f.WriteAt([]byte(content), 0); err == nil {
		err = f.Truncate(int64(len(content)))
	}
	return errors.Join(err, f.Close())
}

// names sets the kernel's host name and writes /etc/hostname and /etc/hosts.
func (f *files) names(hostname string, node netip.Addr) error {
	if f.written["hostname"] != hostname+"\n" {
		if err := unix.Sethostname([]byte(hostname)); err != nil {
			return fmt.Errorf("set host name to %s: %w", hostname, err)
		}
	}
	if err := f.write("hostname", hostname+"\n"); err != nil {
		return err
	}
	return f.write("hosts", hosts(hostname, node))
}

func hosts(hostname string, node netip.Addr) string {
	own := node.String()
	if !node.IsValid() {
		own = "127.0.1.1" // so that the node's own name always resolves
	}
	if short, _, dotted := strings.Cut(hostname, "."); dotted {
		hostname += " " + short
	}
	return "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n" + own + " " + hostname + "\n"
}

func (f *files) resolvers(servers []netip.Addr) error {
	var b strings.Builder
	for i, s := range servers {
		if i == maxNameservers {
			break
		}
		fmt.Fprintf(&b, "nameserver %s\n", s)
	}
	return f.write("resolv.conf", b.String())
}
