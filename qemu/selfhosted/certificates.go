package selfhosted

import (
	"context"
	"fmt"
	"net/netip"
	"path"
	"strings"
	"time"

	"github.com/garboard-os/garboard/config/pki"
)

// validity is how long the certificates are valid: nothing renews them.
const validity = 365 * 24 * time.Hour

// certificates completes the files of the Secrets: the API servers get a certificate that is
// valid on all control planes, and the pod-checkpointer gets its access.
func (s *conversion) certificates(ctx context.Context, files map[string]map[string][]byte) error {
	ca := pki.CA{Cert: files[manager]["ca.crt"], Key: files[manager]["ca.key"]}
	server := pki.Leaf{
		CN: apiServer, DNS: []string{"localhost"}, IPs: []netip.Addr{netip.MustParseAddr("127.0.0.1")},
		Server: true, Validity: validity, Now: time.Now(),
	}
	for _, n := range s.control {
		// Each has the names of its node, of the endpoint and of the Service.
		data, err := s.nodes.read(ctx, n, path.Join("/system/secrets/kubernetes", apiServer, "apiserver.crt"))
		if err != nil {
			return err
		}
		cert, err := pki.ParseCert(data)
		if err != nil {
			return fmt.Errorf("%s: certificate of the API server: %w", n.Name, err)
		}
		server.DNS = append(server.DNS, cert.DNSNames...)
		for _, ip := range cert.IPAddresses {
			if address, ok := netip.AddrFromSlice(ip); ok {
				server.IPs = append(server.IPs, address)
			}
		}
	}
	var err error
	api, access := files[apiServer], map[string][]byte{}
	if api["apiserver.crt"], api["apiserver.key"], err = ca.Issue(server); err != nil {
		return err
	}
	user := pki.Leaf{CN: checkpointer, Client: true, Validity: validity, Now: time.Now()}
	if access["client.crt"], access["client.key"], err = ca.Issue(user); err != nil {
		return err
	}
	// It refers to the certificate's files in its own directory.
	access["kubeconfig"] = []byte(strings.ReplaceAll(string(files[scheduler]["kubeconfig"]), scheduler, checkpointer))
	files[checkpointer] = access
	return nil
}
