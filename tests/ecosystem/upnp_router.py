"""A router that maps ports by UPnP: a small Internet Gateway Device, run inside a router's namespace.

    python upnp_router.py LAN_ADDRESS PUBLIC_ADDRESS

It answers searches, describes itself, and carries out mappings with nftables in the table of
``internet.Home``. It prints a line when it listens, and one for each mapping.
"""

from __future__ import annotations

import re
import socket
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
DEVICE = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
GROUP = ("239.255.255.250", 1900)
PORT = 5000

DESCRIPTION = f"""<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0">
<specVersion><major>1</major><minor>0</minor></specVersion>
<device>
<deviceType>{DEVICE}</deviceType><friendlyName>router</friendlyName>
<manufacturer>tests</manufacturer><modelName>router</modelName><UDN>uuid:router</UDN>
<serviceList><service>
<serviceType>{SERVICE}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
<SCPDURL>/actions.xml</SCPDURL><controlURL>/control</controlURL><eventSubURL>/events</eventSubURL>
</service></serviceList>
</device></root>"""

TYPES = {
    "NewRemoteHost": "string",
    "NewExternalPort": "ui2",
    "NewProtocol": "string",
    "NewInternalPort": "ui2",
    "NewInternalClient": "string",
    "NewEnabled": "boolean",
    "NewPortMappingDescription": "string",
    "NewLeaseDuration": "ui4",
    "NewExternalIPAddress": "string",
}
ACTIONS = {
    "AddPortMapping": list(TYPES)[:8],
    "DeletePortMapping": list(TYPES)[:3],
    "GetExternalIPAddress": [],
}
RESULTS = {"GetExternalIPAddress": ["NewExternalIPAddress"]}


def main(lan: str, public: str) -> None:
    server = ThreadingHTTPServer((lan, PORT), _handler(public))
    searches = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    searches.bind(GROUP)
    member = struct.pack("4s4s", socket.inet_aton(GROUP[0]), socket.inet_aton(lan))
    searches.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
    threading.Thread(target=_answer_searches, args=(searches, lan), daemon=True).start()
    _say("ready")
    server.serve_forever()


def _answer_searches(searches: socket.socket, lan: str) -> None:
    answer = (
        "HTTP/1.1 200 OK",
        "CACHE-CONTROL: max-age=120",
        "EXT:",
        f"LOCATION: http://{lan}:{PORT}/description.xml",
        f"ST: {DEVICE}",
        f"USN: uuid:router::{DEVICE}",
        "\r\n",
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as answers:
        answers.bind((lan, 0))
        while True:
            _, sender = searches.recvfrom(2000)
            answers.sendto("\r\n".join(answer).encode(), sender)


def _handler(public: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(DESCRIPTION if self.path == "/description.xml" else _actions())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            action = self.headers["SOAPAction"].strip('"').rpartition("#")[2]
            found = {name: _text(body, name) for name in ACTIONS[action]}
            if action == "AddPortMapping":
                _forward(found["NewExternalPort"], found["NewInternalClient"], found["NewInternalPort"])
            _say(f"{action} {found.get('NewExternalPort', '')}")
            result = f"<NewExternalIPAddress>{public}</NewExternalIPAddress>" if not found else ""
            self._send(
                '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
                's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>'
                f'<u:{action}Response xmlns:u="{SERVICE}">{result}</u:{action}Response>'
                "</s:Body></s:Envelope>"
            )

        def _send(self, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/xml")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    return Handler


def _actions() -> str:
    def argument(name: str, direction: str) -> str:
        return (
            f"<argument><name>{name}</name><direction>{direction}</direction>"
            f"<relatedStateVariable>{name}</relatedStateVariable></argument>"
        )

    actions = "".join(
        f"<action><name>{action}</name><argumentList>"
        + "".join(argument(name, "in") for name in names)
        + "".join(argument(name, "out") for name in RESULTS.get(action, []))
        + "</argumentList></action>"
        for action, names in ACTIONS.items()
    )
    variables = "".join(
        f'<stateVariable sendEvents="no"><name>{name}</name><dataType>{kind}</dataType></stateVariable>'
        for name, kind in TYPES.items()
    )
    return (
        '<?xml version="1.0"?><scpd xmlns="urn:schemas-upnp-org:service-1-0">'
        "<specVersion><major>1</major><minor>0</minor></specVersion>"
        f"<actionList>{actions}</actionList><serviceStateTable>{variables}</serviceStateTable></scpd>"
    )


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _text(body: str, name: str) -> str:
    found = re.search(f"<{name}>([^<]*)</{name}>", body)
    return found[1] if found else ""


def _forward(external: str, host: str, port: str) -> None:
    rule = ["iifname", "wan", "tcp", "dport", external, "dnat", "ip", "to", f"{host}:{port}"]
    subprocess.run(["nft", "add", "rule", "inet", "home", "prerouting", *rule], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
