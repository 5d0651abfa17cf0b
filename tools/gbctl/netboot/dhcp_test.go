package netboot

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/insomniacslk/dhcp/iana"
	"github.com/vishvananda/netlink"

	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

const clientMAC = "52:54:00:12:34:56"

// guid is what a machine sends as option 97, and wantUUID is what Linux calls it.
var guid = []byte{0, 0x44, 0x45, 0x4c, 0x4c, 0x51, 0x00, 0x10, 0x38, 0x80, 0x52, 0xb4, 0xc0, 0x4f, 0x4a, 0x4d, 0x31}

const wantUUID = "4c4c4544-0051-3810-8052-b4c04f4a4d31"

// question is what a firmware of a type sends.
func question(t *testing.T, class string, arch iana.Arch, more ...dhcpv4.Modifier) *dhcpv4.DHCPv4 {
	t.Helper()
	q, err := dhcpv4.NewDiscovery(mac(t, clientMAC), append([]dhcpv4.Modifier{
		dhcpv4.WithOption(dhcpv4.OptClassIdentifier(fmt.Sprintf("%s:Arch:%05d:UNDI:002001", class, arch))),
		dhcpv4.WithOption(dhcpv4.OptClientArch(arch)),
		dhcpv4.WithGeneric(dhcpv4.OptionClientMachineIdentifier, guid),
		dhcpv4.WithRequestedOptions(dhcpv4.OptionTFTPServerName, dhcpv4.OptionBootfileName, dhcpv4.OptionVendorSpecificInformation),
	}, more...)...)
	if err != nil {
		t.Fatal(err)
	}
	return q
}

func TestBootFiles(t *testing.T) {
	s, err := open(t.Context(), Options{On: loopback(t), Out: io.Discard}, ports{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	iPXE := dhcpv4.WithUserClass("iPXE", false)
	request := dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest)
	for _, c := range []struct {
		what  string
		q     *dhcpv4.DHCPv4
		again bool
		file  string // "": no answer
	}{
		{"BIOS", question(t, pxeClass, iana.INTEL_X86PC), false, "undionly.kpxe"},
		{"BIOS without option 93", question(t, pxeClass, iana.INTEL_X86PC, dhcpv4.WithoutOption(dhcpv4.OptionClientSystemArchitectureType)), false, "undionly.kpxe"},
		{"UEFI without option 93", question(t, pxeClass, iana.EFI_X86_64, dhcpv4.WithoutOption(dhcpv4.OptionClientSystemArchitectureType)), false, "garboard.efi"},
		{"UEFI", question(t, pxeClass, iana.EFI_X86_64), false, "garboard.efi"},
		{"UEFI, type 9", question(t, pxeClass, iana.EFI_BC), false, "garboard.efi"},
		{"UEFI asks the boot server", question(t, pxeClass, iana.EFI_X86_64, request), true, "garboard.efi"},
		{"HTTP boot", question(t, httpClass, iana.EFI_X86_64_HTTP), false, s.url("garboard.efi")},
		{"iPXE in a BIOS", question(t, pxeClass, iana.INTEL_X86PC, iPXE), false, s.url("boot.ipxe")},
		{"iPXE, user class of RFC 3004", question(t, pxeClass, iana.INTEL_X86PC, dhcpv4.WithUserClass("iPXE", true)), false, s.url("boot.ipxe")},
		{"iPXE in UEFI", question(t, pxeClass, iana.EFI_X86_64, iPXE), false, s.url("boot.ipxe")},
		{"ARM", question(t, pxeClass, iana.EFI_ARM64), false, ""},
		{"UEFI with 32 bits", question(t, pxeClass, iana.EFI_IA32), false, ""},
		{"HTTP boot with the type of PXE", question(t, httpClass, iana.EFI_X86_64), false, ""},
		{"a request to the DHCP server", question(t, pxeClass, iana.EFI_X86_64, request), false, ""},
		{"a search at the port of the boot server", question(t, pxeClass, iana.EFI_X86_64), true, ""},
		{"another client", question(t, "MSFT 5.0", iana.INTEL_X86PC), false, ""},
		{"a client without a class", question(t, "", iana.INTEL_X86PC, dhcpv4.WithoutOption(dhcpv4.OptionClassIdentifier)), false, ""},
		{"an answer of another server", question(t, pxeClass, iana.INTEL_X86PC, func(d *dhcpv4.DHCPv4) { d.OpCode = dhcpv4.OpcodeBootReply }), false, ""},
	} {
		a, err := s.answer(c.q, c.again)
		switch {
		case err != nil || a == nil && c.file != "" || a != nil && c.file == "":
			t.Errorf("%s: %v, %v", c.what, a, err)
			continue
		case a == nil:
			continue
		}
		kind := dhcpv4.MessageTypeOffer
		if c.again {
			kind = dhcpv4.MessageTypeAck
		}
		class, _, _ := strings.Cut(c.q.ClassIdentifier(), ":")
		if a.BootFileName != c.file || a.MessageType() != kind || a.ClassIdentifier() != class || !a.YourIPAddr.IsUnspecified() ||
			!a.ServerIPAddr.Equal(net.IPv4(127, 0, 0, 1)) || !a.ServerIdentifier().Equal(net.IPv4(127, 0, 0, 1)) || a.ServerHostName != "127.0.0.1" ||
			!slices.Equal(a.Options.Get(dhcpv4.OptionClientMachineIdentifier), guid) || a.TransactionID != c.q.TransactionID {
			t.Errorf("%s: %s", c.what, a.Summary())
		}
		if option := a.BootFileNameOption(); strings.HasPrefix(c.file, "http") != (option == c.file) {
			t.Errorf("%s: option 67 is %q", c.what, option)
		}
		if control := a.Options.Get(dhcpv4.OptionVendorSpecificInformation); (c.file == "undionly.kpxe") != (control != nil) {
			t.Errorf("%s: option 43 is %v", c.what, control)
		}
	}
	relayed := question(t, pxeClass, iana.INTEL_X86PC, dhcpv4.WithGatewayIP(net.IPv4(10, 1, 2, 3)))
	if to := destination(relayed, &net.UDPAddr{IP: net.IPv4(10, 1, 2, 3), Port: 67}); to.String() != "10.1.2.3:67" {
		t.Errorf("the answer to a relay goes to %s", to)
	}
}

// network makes a network: the server's interface is in the namespace of the test, and a thread is in the one of a
// machine.
func network(t *testing.T) (Interface, *osthread.Thread) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: a network namespace")
	}
	thread, err := osthread.NewInNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { thread.Close() })
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "server"
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "machine", PeerHardwareAddr: mac(t, clientMAC)}
	if err := netlink.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(veth) })
	peer, err := netlink.LinkByName("machine")
	if err != nil {
		t.Fatal(err)
	}
	var ns *os.File
	if err := thread.Do(func() (err error) { ns, err = os.Open("/proc/thread-self/ns/net"); return err }); err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	if err := netlink.LinkSetNsFd(peer, int(ns.Fd())); err != nil {
		t.Fatal(err)
	}
	up := func(name, address string) error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(address)
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, a); err != nil {
			return err
		}
		return netlink.LinkSetUp(link)
	}
	if err := up("server", "10.9.0.1/24"); err != nil {
		t.Fatal(err)
	}
	if err := thread.Do(func() error { return up("machine", "10.9.0.2/24") }); err != nil {
		t.Fatal(err)
	}
	return Interface{"server", netip.MustParseAddr("10.9.0.1")}, thread
}

// A machine gets its boot file over a real network. Other clients get no answer: the first one that they could get is
// for the machine.
func TestProxyDHCP(t *testing.T) {
	on, thread := network(t)
	if found, err := FindInterface("10.9.0.1"); err != nil || found != on {
		t.Errorf("interface %v, %v", found, err)
	}
	if _, err := FindInterface("eth7"); err == nil || !strings.Contains(err.Error(), "no interface eth7 is up with an IPv4 address; there are:\n  server (10.9.0.1)") {
		t.Errorf("error: %v", err)
	}
	_, out := serve(t, Options{On: on}, ports{dhcp: dhcpPort, boot: bootPort, tftp: tftpPort, http: 8080})
	if _, err := open(t.Context(), Options{On: on, Out: io.Discard}, ports{dhcp: dhcpPort}); err == nil || !strings.Contains(err.Error(), "UDP port 67 (proxy DHCP) is in use by another program") {
		t.Errorf("a second server: %v", err)
	}
	var machine *nclient4.Client
	if err := thread.Do(func() (err error) { machine, err = nclient4.New("machine"); return err }); err != nil {
		t.Fatal(err)
	}
	defer machine.Close()
	ctx, cancel := eventually.Context(t.Context(), budget)
	defer cancel()
	q := question(t, pxeClass, iana.INTEL_X86PC)
	other := question(t, "MSFT 5.0", iana.INTEL_X86PC, dhcpv4.WithTransactionID(q.TransactionID))
	var answers []string
	match := func(p *dhcpv4.DHCPv4) bool {
		answers = append(answers, p.BootFileName)
		return true
	}
	ask := func(q *dhcpv4.DHCPv4) (*dhcpv4.DHCPv4, error) {
		return machine.SendAndRead(ctx, nclient4.DefaultServers, q, match)
	}
	quiet, cancelQuiet := eventually.Context(ctx, 0)
	cancelQuiet()
	_, _ = machine.SendAndRead(quiet, nclient4.DefaultServers, other, match)
	a, err := ask(q)
	if err != nil || a.BootFileName != "undionly.kpxe" || len(answers) != 1 {
		t.Errorf("answers %v: %v, %v", answers, a, err)
	}
	out.says(t, clientMAC+" (BIOS, UUID "+wantUUID+") asks for a boot file: undionly.kpxe")

	if a, err = ask(question(t, httpClass, iana.EFI_X86_64_HTTP)); err != nil || a.BootFileNameOption() != "http://10.9.0.1:8080/garboard.efi" {
		t.Errorf("HTTP boot: %v, %v", a, err)
	}
	bootServer(t, thread)
	out.says(t, clientMAC+" (UEFI HTTP boot, UUID "+wantUUID+") asks for a boot file: garboard.efi")
	if strings.Contains(out.String(), "MSFT") {
		t.Errorf("report:\n%s", out)
	}
}

// bootServer asks at the port of the boot server, as UEFI does when it has its address.
func bootServer(t *testing.T, thread *osthread.Thread) {
	t.Helper()
	machine, err := port(thread)
	if err != nil {
		t.Fatal(err)
	}
	defer machine.Close()
	q := question(t, pxeClass, iana.EFI_X86_64, dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest), dhcpv4.WithClientIP(net.IPv4(10, 9, 0, 2)))
	if _, err := machine.WriteTo(q.ToBytes(), &net.UDPAddr{IP: net.IPv4(10, 9, 0, 1), Port: bootPort}); err != nil {
		t.Fatal(err)
	}
	if err := machine.SetReadDeadline(time.Now().Add(eventually.Scale(budget))); err != nil {
		t.Fatal(err)
	}
	packet := make([]byte, 1500)
	n, _, err := machine.ReadFrom(packet)
	if err != nil {
		t.Fatal(err)
	}
	if a, err := dhcpv4.FromBytes(packet[:n]); err != nil || a.MessageType() != dhcpv4.MessageTypeAck || a.BootFileName != "garboard.efi" {
		t.Errorf("boot server: %v, %v", a, err)
	}
}

func port(thread *osthread.Thread) (c net.PacketConn, err error) {
	err = thread.Do(func() (err error) { c, err = net.ListenPacket("udp4", "10.9.0.2:4011"); return err })
	return c, err
}
