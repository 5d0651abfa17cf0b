package secrets

import (
	"cmp"
	"context"
	"crypto"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"connectrpc.com/connect"

	"github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
)

const (
	// dialTimeout: a control plane is near. One without power doesn't answer at
	// all, and must not delay the request to the next one.
	dialTimeout = 3 * time.Second
	// askTimeout limits the whole request to one control plane: under emulation a
	// TLS handshake takes a second.
	askTimeout = 10 * time.Second
	// maxAnswer is a certificate, or an error text.
	maxAnswer = 16 << 10
)

// signingClient gets a worker's certificate from trustd.
type signingClient struct {
	dial func(ctx context.Context, from netip.Addr, address string) (net.Conn, error)
	// kubeletClient is the file with the client certificate of the kubelet, and its key.
	kubeletClient string
}

// prove signs a request with the present certificate of the machine API, which makes the token needless.
// Without one, it proves that this machine is the node that Kubernetes knows.
func (a *signingClient) prove(present config.CertKey, request []byte) ([]byte, error) {
	if len(present.Crt) > 0 {
		return pki.Prove(present.Crt, present.Key, RenewPurpose, request)
	}
	pair, err := untrusted.ReadLinked(a.kubeletClient, maxAnswer)
	if err != nil {
		return nil, err
	}
	return pki.Prove(pair, pair, SignPurpose, request)
}

func dial(ctx context.Context, from netip.Addr, address string) (net.Conn, error) {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: from.AsSlice()}}
	return d.DialContext(ctx, "tcp", address)
}

// ask asks one host after the other until one has signed. present is the certificate that counts now, or none.
func (a *signingClient) ask(ctx context.Context, n node, hosts []string, present config.CertKey, key config.KeyPEM, want pki.Leaf) (config.PEM, error) {
	request, err := pki.NewRequest(key, want)
	if err != nil {
		return nil, err
	}
	// Without any proof, the name must be free, or bound to this key.
	proof, _ := a.prove(present, request)
	var errs []error
	if len(hosts) == 0 {
		errs = append(errs, errNoneKnown)
	}
	if endpoint := n.config.Cluster.ControlPlane.Endpoint.Hostname(); !slices.Contains(hosts, endpoint) {
		hosts = append(slices.Clone(hosts), endpoint)
	}
	for _, host := range hosts {
		crt, err := a.askOne(ctx, n, host, request, proof)
		if err == nil {
			err = checkAnswer(crt, key, n.config.Machine.CA.Crt, want)
		}
		if err == nil {
			return crt, nil
		}
		errs = append(errs, fmt.Errorf("%s: %w", host, err))
		if ctx.Err() != nil {
			break
		}
	}
	return nil, noneSigned(errs)
}

var errNoneKnown = errors.New("no control plane is known yet: Kubernetes lists them for cluster.token, and for a node that has joined")

// controlPlanes are the hosts of the API servers in Kubernetes' list, those that aren't ready
// last: trustd may run there despite that. So no worker depends on one that has failed.
func controlPlanes(servers []resource.Object[balancer.APIServer]) []string {
	var ready, others []string
	for _, s := range servers {
		at, err := netip.ParseAddrPort(s.ID)
		switch {
		case err != nil || s.Spec.From != balancer.FromKubernetes:
		case s.Spec.Ready:
			ready = append(ready, at.Addr().String())
		default:
			others = append(others, at.Addr().String())
		}
	}
	return append(ready, others...)
}

// noneSigned is the reason why there is no certificate, in one line.
type noneSigned []error

func (e noneSigned) Error() string {
	text := "no control plane signs a certificate for the machine API"
	for i, err := range e {
		text += []string{": ", "; "}[min(i, 1)] + err.Error()
	}
	return text
}

// Unwrap is for errors.Is and errors.As.
func (e noneSigned) Unwrap() []error { return e }

// askOne asks one control plane, from the address for which the certificate is.
func (a *signingClient) askOne(ctx context.Context, n node, host string, request, proof []byte) (config.PEM, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, dialTimeout)
			defer cancel()
			return a.dial(ctx, n.primary, address)
		},
		TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pki.Pool(n.config.Machine.TrustedCAs()), ServerName: host},
		DisableKeepAlives:      true,
		MaxResponseHeaderBytes: maxAnswer,
	}
	client := garboardv1connect.NewTrustServiceClient(&http.Client{
		Transport: transport,
		// Only this server may get the token.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}, "https://"+net.JoinHostPort(host, strconv.Itoa(api.TrustPort)), connect.WithReadMaxBytes(maxAnswer))
	answer, err := client.Sign(ctx, connect.NewRequest(&apiv1.SignRequest{Token: string(n.config.Machine.Token), Request: request, Proof: proof}))
	if connect.CodeOf(err) == connect.CodeUnauthenticated {
		return nil, errToken
	}
	if err != nil {
		return nil, err
	}
	return answer.Msg.GetCertificate(), nil
}

var errToken = errors.New("it doesn't take this node's token: a node that joins, or whose certificate or Node object is gone, needs a machine.token that counts (gbctl token list, gbctl token create). " +
	"Without a certificate the machine API of this node can't take another token, so give it a new configuration with such a token; " +
	"or, if machine.token of the control planes is the wrong one, change that: it takes effect at once")

// checkAnswer makes sure that the answer is a certificate of the cluster, for
// our key, with the required content.
func checkAnswer(crt config.PEM, key config.KeyPEM, ca config.PEM, want pki.Leaf) error {
	cert, err := pki.ParseCert(crt)
	own, bad := pki.ParseKey(key)
	if err = cmp.Or(err, bad); err != nil {
		return err
	}
	public, ok := own.Public().(interface{ Equal(crypto.PublicKey) bool })
	authority := config.CertKey{Crt: ca}
	switch {
	case !ok || !public.Equal(cert.PublicKey):
		return errors.New("it answers with a certificate for another key")
	case !signedBy(cert, authority):
		return errors.New("it answers with a certificate of another authority")
	case !fits(cert, authority, want):
		return fmt.Errorf("it answers with a certificate that this node can't use: for %s, valid from %s to %s; is the clock right, here and there?",
			cert.Subject.CommonName, cert.NotBefore.Format(time.RFC3339), cert.NotAfter.Format(time.RFC3339))
	}
	return nil
}
