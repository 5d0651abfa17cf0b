package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"golang.org/x/sys/unix"
)

// cleanHostname is name as the name of a node. Of a name that is too long, its first label is
// enough. Every machine calls itself localhost.
func cleanHostname(name string) (string, error) {
	clean := strings.ToLower(strings.TrimSuffix(strings.TrimRight(name, "\x00"), "."))
	label, _, _ := strings.Cut(clean, ".")
	if len(clean) > config.MaxHostname {
		clean = label
	}
	switch {
	case label == "localhost":
		return "", fmt.Errorf("%q is every machine's own name", name)
	case len(clean) > config.MaxHostname:
		return "", fmt.Errorf("%q is longer than the %d bytes that Linux allows", name, config.MaxHostname)
	case !config.IsDNSName(clean):
		return "", fmt.Errorf("%q isn't a DNS name of lower-case letters, digits, dashes and dots (RFC 1123)", name)
	}
	return clean, nil
}

// cleanDomain is a domain as a search domain, or "" if it isn't one.
func cleanDomain(domain string) string {
	domain = strings.ToLower(strings.TrimSuffix(strings.TrimSpace(domain), "."))
	if !config.IsDNSName(domain) {
		return ""
	}
	return domain
}

// maxFile is more than any of the files can have.
const maxFile = 1 << 16

// hostnameFromMAC is the name of a node without a configured one: the same at each boot.
func hostnameFromMAC(mac net.HardwareAddr) string {
	return fmt.Sprintf("garboard-%x", []byte(mac))
}

// write changes a file of /etc that has another content, whoever has written that.
func (o *owner) write(name, content string) error {
	path := filepath.Join(o.o.etcDir, name)
	if old, err := untrusted.ReadFile(path, maxFile); err == nil && string(old) == content {
		return nil
	}
	return replace(path, content)
}

// replace changes a file in place: the kubelet's container has the file itself mounted,
// and would keep the old one after a rename. For a short time the end of a longer old
// content follows the new one; after a power cut /etc is made again in any case.
func replace(path, content string) error {
	f, err := untrusted.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	if _, err = f.WriteAt([]byte(content), 0); err == nil {
		err = f.Truncate(int64(len(content)))
	}
	return errors.Join(err, f.Close())
}

// writeNames sets the kernel's host name and writes /etc/hostname and /etc/hosts.
func (o *owner) writeNames(hostname string, node netip.Addr, entries []config.HostEntry) error {
	if now, err := os.Hostname(); err != nil || now != hostname {
		if err := unix.Sethostname([]byte(hostname)); err != nil {
			return fmt.Errorf("set host name to %s: %w", hostname, err)
		}
	}
	if err := o.write("hostname", hostname+"\n"); err != nil {
		return err
	}
	return o.write("hosts", hosts(hostname, node, entries))
}

func hosts(hostname string, node netip.Addr, entries []config.HostEntry) string {
	own := node.String()
	if !node.IsValid() {
		own = "127.0.1.1" // so that the node's own name always resolves
	}
	if short, _, dotted := strings.Cut(hostname, "."); dotted {
		hostname += " " + short
	}
	text := "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n" + own + " " + hostname + "\n"
	for _, e := range entries {
		text += e.IP.String() + " " + strings.Join(e.Aliases, " ") + "\n"
	}
	return text
}

func (o *owner) writeResolvers(path string, servers []netip.Addr, search []string) error {
	text := ""
	for _, s := range servers[:min(len(servers), config.MaxNameservers)] {
		text += "nameserver " + s.String() + "\n"
	}
	if len(search) > 0 {
		text += "search " + strings.Join(search, " ") + "\n"
	}
	return o.write(filepath.Base(path), text)
}
