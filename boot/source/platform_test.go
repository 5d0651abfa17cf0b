package source

import (
	"context"
	"errors"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/garboard-os/garboard/boot"
)

// cloud answers as the metadata services of clouds are documented, for a machine with user data.
func cloud(t *testing.T) *httptest.Server {
	t.Helper()
	mux := http.NewServeMux()
	handle := func(pattern, query, header, value, answer string) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.RawQuery != query || header != "" && r.Header.Get(header) != value {
				http.Error(w, "", http.StatusForbidden)
				return
			}
			_, _ = w.Write([]byte(answer))
		})
	}
	handle("PUT /latest/api/token", "", "X-aws-ec2-metadata-token-ttl-seconds", "300", "the token")
	handle("GET /latest/user-data", "", "X-aws-ec2-metadata-token", "the token", "for aws")
	handle("GET /computeMetadata/v1/instance/attributes/user-data", "", "Metadata-Flavor", "Google", "for gcp")
	handle("GET /metadata/instance/compute/userData", "api-version=2021-01-01&format=text", "Metadata", "true", "Zm9yIGF6dXJl")
	handle("GET /hetzner/v1/userdata", "", "", "", "for hcloud")
	handle("GET /seed/user-data", "", "", "", "for nocloud")
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server
}

func TestPlatforms(t *testing.T) {
	server, empty := cloud(t), httptest.NewServer(http.NewServeMux())
	defer empty.Close()
	// Without user data, AWS gives a token all the same.
	bare := http.NewServeMux()
	bare.HandleFunc("PUT /latest/api/token", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("t")) })
	aws := httptest.NewServer(bare)
	defer aws.Close()
	for _, tt := range []struct {
		platform, metadata string
		root               fstest.MapFS
		mount              boot.Mounter
		data, err          string
	}{
		{platform: "aws", metadata: server.URL, data: "for aws"},
		{platform: "gcp", metadata: server.URL, data: "for gcp"},
		{platform: "azure", metadata: server.URL, data: "for azure"},
		{platform: "hcloud", metadata: server.URL, data: "for hcloud"},
		{platform: "nocloud", mount: volume("cidata", files("/user-data", "on a volume")), data: "on a volume"},
		{platform: "nocloud", mount: volume("CIDATA", files("/user-data", "on a volume")), data: "on a volume"},
		{platform: "nocloud", root: files(productSerial, "ds=nocloud;s="+server.URL+"/seed/\n"), data: "for nocloud"},
		{platform: "aws", metadata: aws.URL, err: "the machine has no user data"},
		{platform: "gcp", metadata: empty.URL, err: "the machine has no user data"},
		{platform: "nocloud ds=nocloud;s=" + server.URL + "/seed", data: "for nocloud"},
		{platform: "nocloud ds=nocloud-net;s=" + server.URL + "/seed/", data: "for nocloud"},
		{platform: "nocloud ds=nocloud;h=name", err: "no volume cidata with user-data, and no kernel argument or serial number ds=nocloud;s=URL"},
		{platform: "nocloud", err: "no volume cidata with user-data, and no kernel argument or serial number ds=nocloud;s=URL"},
		{platform: "metal", err: "SMBIOS: no OEM string garboard.config= in /sys/firmware/dmi/entries"},
		{platform: "vmware", mount: volume("OVF ENV", files("/ovf-env.xml", ovfEnvironment("user-data", "Zm9yIHZtd2FyZQ=="))), data: "for vmware"},
		{platform: "vmware", mount: volume("OVF ENV", files("/ovf-env.xml", ovfEnvironment("hostname", "Zm9yIHZtd2FyZQ=="))), err: "no property user-data in ovf-env.xml"},
		{platform: "vmware", mount: volume("OVF ENV", files("/ovf-env.xml", ovfEnvironment("user-data", "%"))), err: "the property user-data isn't base64"},
		{platform: "vmware", mount: volume("OVF ENV", files("/ovf-env.xml", "<Environment>")), err: "ovf-env.xml: XML syntax error on line 1: unexpected EOF"},
		{platform: "vmware", err: "no volumes here"},
		{platform: "mars", err: "read configuration from platform mars: garboard.platform=mars: must be one of metal, nocloud, vmware, aws, azure, gcp, hcloud"},
	} {
		o := Options{Root: tt.root, Cmdline: boot.ParseCmdline("garboard.platform=" + tt.platform), Metadata: tt.metadata, Mount: orNone(tt.mount), Wait: noWait}
		if tt.root == nil {
			o.Root = fstest.MapFS{}
		}
		found, err := Find(t.Context(), All(o))
		if string(found.Data) != tt.data || tt.err == "" && err != nil {
			t.Errorf("%s: %q, %v", tt.platform, found.Data, err)
		}
		if tt.err != "" && (err == nil || !strings.HasSuffix(err.Error(), tt.err)) {
			t.Errorf("%s: %v, want %s", tt.platform, err, tt.err)
		}
	}
}

func TestVariablesInTheURL(t *testing.T) {
	var asked string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = r.URL.RequestURI()
		_, _ = w.Write([]byte("x"))
	}))
	defer server.Close()
	root := files(productUUID, "4C4C4544-AB\n", productSerial, "A&B 7\n", kernelHostname, "node-1\n",
		"/sys/class/net/eth0/address", "52:54:00:00:00:02\n", "/sys/class/net/ens1/address", "52:54:00:00:00:01\n", "/sys/class/net/aaa/address", "00:00:00:00:00:00\n")
	root["sys/class/net/eth0/device"], root["sys/class/net/ens1/device"] = &fstest.MapFile{Mode: fs.ModeDir}, &fstest.MapFile{Mode: fs.ModeDir}
	find := func(root fs.FS, query string) error {
		_, err := Find(t.Context(), All(Options{Root: root, Cmdline: boot.ParseCmdline("garboard.config=" + server.URL + query), Wait: noWait}))
		return err
	}
	if err := find(root, "/${hostname}?u=${uuid}&s=${serial}&m=${mac}"); err != nil || asked != "/node-1?u=4c4c4544-ab&s=A%26B%207&m=52%3A54%3A00%3A00%3A00%3A01" {
		t.Errorf("asked %s: %v", asked, err)
	}
	// What isn't known yet is no reason to go on without the configuration.
	for query, want := range map[string]string{
		"/${hostname}": "${hostname} in garboard.config: the machine has no hostname yet",
		"/${mac}":      "${mac} in garboard.config: the machine has no network interface yet",
		"/${uuid}":     "${uuid} in garboard.config: no " + productUUID,
		"/${ip}":       "${ip} in garboard.config: known are ${uuid}, ${serial}, ${mac} and ${hostname}",
	} {
		if err := find(files(kernelHostname, "(none)\n"), query); err == nil || errors.Is(err, boot.ErrNone) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", query, err)
		}
	}
	// The name comes with the network, which starts when it is needed.
	late := fstest.MapFS(files(kernelHostname, boot.FirstHostname+"\n"))
	_, err := Find(t.Context(), All(Options{Root: late, Cmdline: boot.ParseCmdline("garboard.config=" + server.URL + "/${hostname}"), Wait: func(context.Context, time.Duration) error {
		late[strings.TrimPrefix(kernelHostname, "/")] = &fstest.MapFile{Data: []byte("node-2\n")}
		return nil
	}}))
	if err != nil || asked != "/node-2" {
		t.Errorf("asked %s: %v", asked, err)
	}
}

// ovfEnvironment is a document as a hypervisor writes it (DSP0243, 11.2), with one more property.
func ovfEnvironment(key, value string) string {
	return `<?xml version="1.0" encoding="UTF-8"?>
<Environment xmlns="http://schemas.dmtf.org/ovf/environment/1" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"
 xmlns:oe="http://schemas.dmtf.org/ovf/environment/1" xmlns:ve="http://www.vmware.com/schema/ovfenv" oe:id="" ve:vCenterId="vm-17">
 <PlatformSection><Kind>VMware ESXi</Kind><Version>8.0.2</Version><Vendor>VMware, Inc.</Vendor><Locale>en</Locale></PlatformSection>
 <PropertySection>
  <Property oe:key="instance-id" oe:value="id-ovf"/>
  <Property oe:key="` + key + `" oe:value="` + value + `"/>
 </PropertySection>
</Environment>
`
}

// The network is beside the user data; most clouds have none, which is DHCP.
func TestNetworkOfAPlatform(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/seed/network-config", "/hetzner/v1/metadata/network-config":
			_, _ = w.Write([]byte("version: 1"))
		default:
			http.NotFound(w, r)
		}
	}))
	defer server.Close()
	for _, tt := range []struct {
		platform, data string
		mode           boot.Mode
		mount          boot.Mounter
	}{
		{platform: "nocloud", data: "version: 2", mount: volume("cidata", files("/network-config", "version: 2"))},
		{platform: "nocloud", mount: volume("cidata", files("/user-data", "x"))},
		{platform: "nocloud ds=nocloud;s=" + server.URL + "/seed/", data: "version: 1"},
		{platform: "nocloud ds=nocloud;s=" + server.URL + "/other"},
		{platform: "vmware", data: "version: 2", mount: volume("OVF ENV", files("/ovf-env.xml", ovfEnvironment("network-config", "dmVyc2lvbjogMg==")))},
		{platform: "hcloud", data: "version: 1"},
		{platform: "aws"}, {platform: "metal"}, {platform: ""},
		{platform: "hcloud", mode: boot.Container},
	} {
		o := Options{Mode: tt.mode, Root: fstest.MapFS{}, Cmdline: boot.ParseCmdline("garboard.platform=" + tt.platform), Metadata: server.URL, Mount: orNone(tt.mount), Wait: noWait}
		data, err := PlatformNetwork(t.Context(), o)
		if string(data) != tt.data || tt.data == "" && !errors.Is(err, boot.ErrNone) || tt.data != "" && err != nil {
			t.Errorf("%s: %q, %v", tt.platform, data, err)
		}
	}
}
